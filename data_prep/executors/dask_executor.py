"""Running work units on a Dask cluster, whose workers see the same inputs, tokenizer and output as this machine.

The workers need this package installed, and one thread each (`dask worker --nthreads 1`): a worker with more does its
units one after another all the same. Where this process is killed, the units that are running then run to their end,
which harms no run of the same command; a run with --fresh should wait for them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from types import TracebackType
from typing import Any

import distributed
from distributed.comm import CommClosedError

from data_prep.base.errors import UsageError, UserError
from data_prep.executors.executors import Result, Unit
from data_prep.storage import storage

CONNECT_SECONDS = 20.0
WORKER_SECONDS = 60.0

_one_at_a_time = threading.Lock()  # a process's tokenizer is not for several threads


class DaskExecutor:
    """Runs units on the workers of a scheduler such as tcp://10.0.0.1:8786."""

    def __init__(self, scheduler: str) -> None:
        """Connect to the scheduler and wait for its first worker.

        Raises:
            UsageError: the address cannot be understood.
            UserError: nobody answers there, or no worker comes.
        """
        self._scheduler = storage.redact(scheduler)
        try:
            self._client = distributed.Client(scheduler, timeout=CONNECT_SECONDS, set_as_default=False)
        except ValueError as error:
            raise UsageError(f"--scheduler={self._scheduler} is no address ({error}); give tcp://HOST:PORT") from None
        except (OSError, CommClosedError) as error:
            raise UserError(
                f"no Dask scheduler answers at {self._scheduler} within {CONNECT_SECONDS:.0f} s ({error}); start one "
                "with 'dask scheduler', and check host, port and firewall"
            ) from None
        try:
            self._client.wait_for_workers(1, timeout=WORKER_SECONDS)
        except (OSError, TimeoutError):
            self._client.close()
            raise UserError(
                f"the Dask scheduler at {self._scheduler} has no worker; start some with "
                f"'dask worker {self._scheduler} --nthreads 1 --nworkers N'"
            ) from None

    def __enter__(self) -> DaskExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def run(self, task: Callable[[Unit], Result], units: Sequence[Unit]) -> Iterator[tuple[Unit, Result]]:
        """See `executors.Executor`; a unit whose worker is lost is begun again on another by Dask."""
        if not units:
            return
        call = functools.partial(_run_unit, task, storage.options())
        # Not pure: a unit is done again where its result was removed. No retries: storage has its own, and a mistake
        # of the user's stays one.
        futures = self._client.map(call, units, pure=False, retries=0, key=task.__name__)
        unit_of = {future.key: unit for future, unit in zip(futures, units, strict=True)}
        try:
            for future in distributed.as_completed(futures, loop=self._client.loop):
                result = future.result()
                yield unit_of.pop(future.key), result
                future.release()
        except distributed.KilledWorker as error:
            raise UserError(
                f"a unit's Dask worker was lost again and again ({error.last_worker.address} was the last), which is "
                "mostly a machine running out of memory; give the workers more (--memory-limit) and run the same "
                "command again, it goes on from the finished units"
            ) from None
        except (CancelledError, CommClosedError) as error:
            raise UserError(
                f"the Dask scheduler at {self._scheduler} was lost ({type(error).__name__}); start it again and run "
                "the same command again, which goes on from the finished units"
            ) from None
        except (ImportError, AttributeError) as error:
            raise UserError(
                f"the Dask workers cannot run this release: {error}; install the same release on every one of them"
            ) from error
        finally:
            self._client.cancel([future for future in futures if future.key in unit_of])


def _run_unit(task: Callable[[Unit], Result], options: Mapping[str, Mapping[str, Any]], unit: Unit) -> Result:
    """On a worker: the unit, with the stores' options of the process that asked for it."""
    with _one_at_a_time:
        storage.configure(options)
        return task(unit)
