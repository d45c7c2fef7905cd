"""Running units in a pool of processes of this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

from data_prep.base import progress
from data_prep.base.errors import UserError
from data_prep.base.logs import logger
from data_prep.base.terminal import counted
from data_prep.executors.worker_process import Packed, Worker, WorkerLost, ready_workers

MAX_LOSSES = 3

Unit = TypeVar("Unit")
Result = TypeVar("Result")


class ProcessExecutor:
    """Runs units in processes of this machine, which it keeps from one run to the next.

    With one worker or one unit, the units run in this process, in order. When a worker is killed, all workers end, and
    new ones run the unfinished units.
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
        """Start the processes, and run the task in each while this process does something else.

        Results and errors are ignored: units that depend on the task do it themselves.
        """
        if self.num_workers == 1:
            return
        try:
            self._start_workers(self.num_workers)
        except WorkerLost:
            self._end_workers(at_once=True)
        packed = Packed.of(task)
        for worker in self._workers:
            worker.begin(packed, None, unit)

    def run(self, task: Callable[[Unit], Result], units: Sequence[Unit]) -> Iterator[tuple[Unit, Result]]:
        if min(self.num_workers, len(units)) <= 1:
            for unit in units:
                try:
                    result = task(unit)
                finally:
                    progress.unit_ended(None)
                yield unit, result
            return
        unfinished, packed = dict(enumerate(units)), Packed.of(task)
        for losses in range(1, MAX_LOSSES + 1):
            try:
                for number, result in self._run_in_workers(packed, unfinished):
                    yield unfinished.pop(number), result
                return
            except WorkerLost:
                logger(__name__).warning(
                    f"a worker process was killed; resubmitting {counted(len(unfinished), 'unfinished unit')} "
                    f"(attempt {losses} of {MAX_LOSSES})"
                )
        raise UserError(
            f"worker processes were killed {MAX_LOSSES} times, most likely because memory ran out",
            fix="rerun the same command with fewer --workers; it resumes from the finished units",
            code="workers-killed",
        )

    def _run_in_workers(self, task: Packed, units: dict[int, Unit]) -> Iterator[tuple[int, Any]]:
        """Yield (number, result) pairs as they come, also those that were done before a worker was killed."""
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
                        worker.begin(task, *waiting.pop())  # before the consumer of the result takes its time
                    if number is not None:
                        yield number, result
            if is_lost:
                raise WorkerLost
        except BaseException:
            # A unit may take minutes, and its result is useless now or is written again.
            self._end_workers(at_once=True)
            raise

    def _start_workers(self, count: int) -> None:
        while len(self._workers) < count:
            self._workers.append(Worker())

    def _end_workers(self, at_once: bool) -> None:
        while self._workers:
            self._workers.pop().end(at_once)
