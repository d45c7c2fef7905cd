"""Running idempotent work units on an executor: in this process, in a pool of processes, or elsewhere.

A unit's task writes its result under a final name as its last act, so a unit may be done twice without harm.
Tasks keep what is dear to load (the tokenizer) in a cache of their own process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Protocol, TypeVar

from data_prep.base.errors import UserError
from data_prep.executors.worker_process import Worker, WorkerLost, ready_workers

MAX_LOSSES = 3

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

    With one worker, or one unit, the units run in this process, in order. Where a worker is killed, all of them are
    ended, and what is not done is begun again with new ones.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._workers: list[Worker] = []

    def __enter__(self) -> ProcessExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_workers(at_once=error is not None)

    def warm_up(self, task: Callable[[Unit], object], unit: Unit) -> None:
        """Start the processes, and have each do the task while this process does something else.

        What becomes of it is not looked at: units that need it done do it themselves.
        """
        if self.num_workers == 1:
            return
        try:
            self._start_workers(self.num_workers)
        except WorkerLost:
            self._end_workers(at_once=True)
        for worker in self._workers:
            worker.begin(task, None, unit)

    def run(self, task: Callable[[Unit], Result], units: Sequence[Unit]) -> Iterator[tuple[Unit, Result]]:
        if min(self.num_workers, len(units)) <= 1:
            for unit in units:
                yield unit, task(unit)
            return
        unfinished = dict(enumerate(units))
        for losses in range(1, MAX_LOSSES + 1):
            try:
                for number, result in self._run_in_workers(task, unfinished):
                    yield unfinished.pop(number), result
                return
            except WorkerLost:
                print(
                    f"a worker process was killed; {len(unfinished)} units that are not done are submitted again "
                    f"(time {losses} of {MAX_LOSSES})",
                    file=sys.stderr,
                    flush=True,
                )
        raise UserError(
            f"worker processes were killed {MAX_LOSSES} times, which is mostly the system running out of memory; "
            "run the same command again with fewer --workers, it goes on from the finished units"
        )

    def _run_in_workers(self, task: Callable[[Unit], Result], units: dict[int, Unit]) -> Iterator[tuple[int, Result]]:
        """The results by number as they come, those that were done before a loss too."""
        waiting = list(units.items())[::-1]
        try:
            self._start_workers(min(self.num_workers, len(waiting)))
            for worker in self._workers:
                if waiting and not worker.is_busy:
                    worker.begin(task, *waiting.pop())
            is_lost = False
            while not is_lost and (waiting or any(worker.number is not None for worker in self._workers)):
                for worker in ready_workers(self._workers):
                    number = worker.number
                    try:
                        result = worker.result()
                    except WorkerLost:
                        is_lost = True
                        continue
                    if waiting:
                        worker.begin(task, *waiting.pop())  # before whoever takes the result is asked to
                    if number is not None:
                        yield number, result
            if is_lost:
                raise WorkerLost
        except BaseException:
            # A unit may take minutes, and what it would write is of no use any more or will be written again.
            self._end_workers(at_once=True)
            raise

    def _start_workers(self, count: int) -> None:
        while len(self._workers) < count:
            self._workers.append(Worker())

    def _end_workers(self, at_once: bool) -> None:
        while self._workers:
            self._workers.pop().end(at_once)
