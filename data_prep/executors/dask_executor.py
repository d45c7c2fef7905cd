"""Running units on a Dask cluster, whose workers see the same inputs, tokenizer and output as this machine.

The workers need this package installed, and one thread each (`dask worker --nthreads 1`): a worker with more threads
still runs one unit at a time. When this process is killed, running units finish on the workers, which harms no later
run of the same command; a run with --fresh should wait for them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from types import TracebackType
from typing import Any

import distributed
from distributed.comm import CommClosedError

from data_prep.base.errors import UsageError, UserError
from data_prep.executors.executors import ExecutorOptions, Result, Unit
from data_prep.storage import storage

CONNECT_SECONDS = 20.0
WORKER_SECONDS = 60.0
_NOT_ON_WORKER = frozenset(
    {
        *("filter-not-importable", "unknown-filter", "filters-changed"),
        *("format-not-importable", "formats-changed", "module-changed"),
    }
)
"""Codes of errors that this process would have raised itself if its environment were the workers'."""

_one_at_a_time = threading.Lock()  # the tokenizer of a process is not thread-safe


def open_dask_executor(options: ExecutorOptions) -> DaskExecutor:
    """Connect to the scheduler that the options name."""
    if options.scheduler is None:
        raise UsageError(
            "executor=dask needs the address of a scheduler",
            fix="give --scheduler tcp://HOST:PORT (in Python: scheduler='tcp://HOST:PORT')",
            code="missing-scheduler",
        )
    return DaskExecutor(options.scheduler)


class DaskExecutor:
    """Runs units on the workers of a scheduler such as tcp://10.0.0.1:8786."""

    def __init__(self, scheduler: str) -> None:
        """Connect to the scheduler and wait for its first worker."""
        self._scheduler = storage.redact(scheduler)
        try:
            self._client = distributed.Client(scheduler, timeout=CONNECT_SECONDS, set_as_default=False)
        except ValueError as error:
            raise UsageError(
                f"scheduler={self._scheduler} (--scheduler) is not an address ({error})",
                fix="give tcp://HOST:PORT",
                code="malformed-address",
            ) from None
        except (OSError, CommClosedError) as error:
            raise UserError(
                f"no Dask scheduler answers at {self._scheduler} within {CONNECT_SECONDS:.0f} s ({error})",
                fix="start one with 'dask scheduler', and check host, port and firewall",
                code="no-scheduler",
            ) from None
        try:
            self._client.wait_for_workers(1, timeout=WORKER_SECONDS)
        except (OSError, TimeoutError):
            self._client.close()
            raise UserError(
                f"the Dask scheduler at {self._scheduler} has no workers after {WORKER_SECONDS:.0f} s",
                fix=f"start some with 'dask worker {self._scheduler} --nthreads 1 --nworkers N'",
                code="no-workers",
            ) from None

    @property
    def num_workers(self) -> int:
        """Workers of the cluster now."""
        return len(self._client.nthreads())

    def __enter__(self) -> DaskExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def run(self, task: Callable[[Unit], Result], units: Sequence[Unit]) -> Iterator[tuple[Unit, Result]]:
        """Run units as `Executor.run` does; Dask reruns the units and lost results of a killed worker on another."""
        if not units:
            return
        call = functools.partial(_run_unit, options=storage.options(), folder=os.getcwd())
        # A result of its own, which every worker fetches once, and which Dask makes again if its workers are killed.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sending large graph", UserWarning)  # once, which is the least
            shared = self._client.submit(_same, task, pure=False)
        # Not pure: a unit runs again if its result was removed. No retries: storage has its own, and a user's mistake
        # stays one.
        futures = self._client.map(call, units, task=shared, pure=False, retries=0, key=task.__name__)
        unit_of = {future.key: unit for future, unit in zip(futures, units, strict=True)}
        try:
            for future in distributed.as_completed(futures, loop=self._client.loop):
                result = future.result()
                yield unit_of.pop(future.key), result
                future.release()
        except distributed.KilledWorker as error:
            raise UserError(
                f"the Dask workers of a unit were killed repeatedly ({error.last_worker.address} was the last), "
                "most likely because memory ran out",
                fix="give the workers more memory (--memory-limit), and rerun the same command; it resumes from the "
                "finished units",
                code="workers-killed",
            ) from None
        except (CancelledError, CommClosedError) as error:
            raise UserError(
                f"the connection to the Dask scheduler at {self._scheduler} was lost ({type(error).__name__})",
                fix="restart the scheduler, and rerun the same command; it resumes from the finished units",
                code="scheduler-lost",
            ) from None
        except UserError as error:
            if error.code not in _NOT_ON_WORKER:
                raise
            raise UserError(
                f"on a Dask worker: {error.problem}",
                fix="restart every worker with the modules of your own on PYTHONPATH ('PYTHONPATH=DIR dask worker "
                f"{self._scheduler} --nthreads 1') and the same packages, then rerun the same command",
                code=error.code,
            ) from error
        except (ImportError, AttributeError) as error:
            raise UserError(
                f"the Dask workers cannot run this release of clozeworks: {error}",
                fix="install the same release on every worker",
                code="release-mismatch",
            ) from error
        finally:
            self._client.cancel([shared, *(future for future in futures if future.key in unit_of)])


def _same(task: Callable[[Unit], Result]) -> Callable[[Unit], Result]:
    return task


def _run_unit(
    unit: Unit, task: Callable[[Unit], Result], options: Mapping[str, Mapping[str, Any]], folder: str
) -> Result:
    """Run the unit on a worker, with the storage options of the process that submitted it, in its working folder.

    Relative names of inputs and of files of filters mean the same there as here; a worker whose machine lacks the
    folder stays in its own.
    """
    with _one_at_a_time, contextlib.chdir(folder) if os.path.isdir(folder) else contextlib.nullcontext():
        storage.configure(options)
        return task(unit)
