"""Running idempotent work units on an executor: in this process, in a pool of processes, or elsewhere.

A unit's task writes its result under a final name as its last act, so a unit may be done twice without harm.
Tasks keep what is dear to load (the tokenizer) in a cache of their own process.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import Any, Protocol, TypeVar

from data_prep.errors import UserError
from data_prep.execution.worker_server import START_METHOD, start_worker_server
from data_prep.files import storage

MAX_BROKEN_POOLS = 3

Unit = TypeVar("Unit")
Result = TypeVar("Result")


class Executor(Protocol):
    """What runs units; `with` gives back what it holds."""

    def run(self, task: Callable[[Unit], Result], units: Sequence[Unit]) -> Iterator[tuple[Unit, Result]]:
        """Run the task on every unit, begun in their order, and yield (unit, result) as they are done.

        Task, units and results travel to other processes, so they are picklable and `task` is a module's own
        function. What `storage.configure` set here is set there first.

        Raises:
            UserError: a task raised it, or its processes were killed again and again.
        """
        ...

    def __enter__(self) -> Executor: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def run_units(
    task: Callable[[Unit], Result], units: Sequence[Unit], executor: Executor | int
) -> Iterator[tuple[Unit, Result]]:
    """`Executor.run`; a number stands for a pool of so many processes, which ends with the units."""
    if isinstance(executor, int):
        with ProcessExecutor(executor) as pool:
            yield from pool.run(task, units)
    else:
        yield from executor.run(task, units)


class ProcessExecutor:
    """Runs units in processes of this machine, which are kept from one run to the next.

    With one worker, or one unit, the units run in this process, in order.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._pool: ProcessPoolExecutor | None = None
        self._others: set[multiprocessing.process.BaseProcess] = set()

    def __enter__(self) -> ProcessExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._stop()
        elif self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None

    def warm_up(self, task: Callable[[Unit], object], unit: Unit) -> None:
        """Start the processes, and have each do the task while this process does something else.

        What becomes of it is not looked at: units that need it done do it themselves.
        """
        if self.num_workers == 1:
            return
        try:
            pool = self._started_pool()
            for _ in range(self.num_workers):
                pool.submit(task, unit)
        except BrokenProcessPool:
            self._stop()

    def run(self, task: Callable[[Unit], Result], units: Sequence[Unit]) -> Iterator[tuple[Unit, Result]]:
        if min(self.num_workers, len(units)) <= 1:
            for unit in units:
                yield unit, task(unit)
            return
        unfinished = dict(enumerate(units))
        for broken_pools in range(1, MAX_BROKEN_POOLS + 1):
            try:
                for number, result in self._run_in_pool(task, unfinished):
                    yield unfinished.pop(number), result
                return
            except BrokenProcessPool:
                print(
                    f"a worker process was killed; {len(unfinished)} units that are not done are submitted again "
                    f"(time {broken_pools} of {MAX_BROKEN_POOLS})",
                    file=sys.stderr,
                    flush=True,
                )
        raise UserError(
            f"worker processes were killed {MAX_BROKEN_POOLS} times, which is mostly the system running out of memory; "
            "run the same command again with fewer --workers, it goes on from the finished units"
        )

    def _run_in_pool(self, task: Callable[[Unit], Result], units: dict[int, Unit]) -> Iterator[tuple[int, Result]]:
        try:
            pool = self._started_pool()
            futures = {pool.submit(task, unit): number for number, unit in units.items()}
            yield from _results(futures)
        except BaseException:
            # A unit may take minutes, and what it would write is of no use any more or will be written again.
            self._stop()
            raise

    def _started_pool(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._others = set(multiprocessing.active_children())
            start_worker_server()
            context = multiprocessing.get_context(START_METHOD)
            self._pool = ProcessPoolExecutor(
                self.num_workers,
                mp_context=context,
                initializer=_begin_worker,
                initargs=(storage.options(), dict(os.environ)),
            )
        return self._pool

    def _stop(self) -> None:
        if self._pool is not None:
            for process in set(multiprocessing.active_children()) - self._others:
                process.terminate()
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None


def _results(futures: dict[Future[Result], int]) -> Iterable[tuple[int, Result]]:
    """Results as they come; those that were done before the pool broke are given out before it is reported."""
    broken: BrokenProcessPool | None = None
    for future in as_completed(futures):
        try:
            result = future.result()
        except BrokenProcessPool as error:
            broken = error
            continue
        yield futures[future], result
    if broken is not None:
        raise broken


def _begin_worker(options: Mapping[str, Mapping[str, Any]], environment: Mapping[str, str]) -> None:
    """Leave Ctrl-C to the parent, and end with it: a pool's process waits for ever where its parent was killed.

    The server that workers are forked from keeps the environment in which it was started, which may be another now.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(environment)
    storage.configure(options)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
