"""A phase of preparation: runs the tasks whose result files do not exist yet on an executor, and adds up their results.

Many results are added up by the workers: no process reads all of them one by one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from data_prep.base.errors import UserError
from data_prep.base.progress import Progress
from data_prep.executors.executors import Executor, num_processes, run_units
from data_prep.executors.tally import Tally
from data_prep.storage import storage
from data_prep.storage.locks import Lock
from data_prep.storage.work_files import read_state, write_state

# A network file system may show a file of another machine with a delay.
_APPEARANCE_SECONDS = 10.0

Task = TypeVar("Task")


@dataclass(frozen=True)
class PhaseRunner:
    """Runs phases on an executor while the lock of the output folder is held."""

    executor: Executor | int
    lock: Lock

    def run(
        self,
        title: str,
        task_function: Callable[[Task], object],
        tasks: Sequence[Task],
        result_url: Callable[[Task], str],
        amount: Callable[[Task], int],
        unit: tuple[str, float],
    ) -> None:
        """Run the tasks without a result, the largest first, so that the workers finish together.

        Args:
            result_url: returns where a task writes its result, as its last act.
            amount: returns how much work a task is.
            unit: unit of `amount` and the divisor for display, such as ("MB", 1e6).

        Raises:
            UserError: a task raised it, the lock was lost, or this process cannot see the results.
        """
        waiting = sorted(unfinished(tasks, result_url), key=amount, reverse=True)
        total = sum(map(amount, tasks))
        processes = num_processes(self.executor, len(waiting))
        with Progress(title, total, *unit, num_tasks=len(tasks), num_processes=processes) as progress:
            progress.skip(total - sum(map(amount, waiting)), len(tasks) - len(waiting))
            for task, _ in run_units(task_function, waiting, self.executor):
                self.lock.check()
                progress.add(amount(task))
        if waiting:
            _check_all_there(tasks, result_url)


def unfinished(tasks: Sequence[Task], result_url: Callable[[Task], str]) -> list[Task]:
    """Return the tasks without a result; lists every folder once instead of asking a store for every task."""
    present: dict[str, set[str]] = {}
    missing = []
    for task in tasks:
        folder, _, name = result_url(task).rpartition("/")
        if folder not in present:
            present[folder] = set(storage.list_names(folder))
        if name not in present[folder]:
            missing.append(task)
    return missing


def _check_all_there(tasks: Sequence[Task], result_url: Callable[[Task], str]) -> None:
    deadline = time.monotonic() + _APPEARANCE_SECONDS
    while missing := unfinished(tasks, result_url):
        if time.monotonic() > deadline:
            raise UserError(
                f"{storage.redact(result_url(missing[0]))} was written by a worker and does not exist for this process",
                fix="give an --output that all machines share, such as a network folder or s3://",
                code="result-not-visible",
            )
        time.sleep(0.2)


FAN_IN = 128
"""Results that one process adds up."""


@dataclass(frozen=True)
class AggregationTask:
    """Results to add up, and the file of the sum.

    Attributes:
        tally_of: a module-level function from the URL of a result to what it counts.
    """

    tally_of: Callable[[str], Tally]
    urls: tuple[str, ...]
    url: str


def add_up_results(
    urls: Sequence[str], tally_of: Callable[[str], Tally], work_folder: str, name: str, runner: PhaseRunner
) -> Tally:
    """Return the sum of the results, in order; of more than `FAN_IN` the workers add up so many each.

    Args:
        name: of the files of the sums in the work folder; different results need different names.

    Raises:
        UserError: a result differs from what was written.
    """
    if len(urls) <= FAN_IN:
        return _sum(map(tally_of, urls))
    tasks = [
        AggregationTask(
            tally_of, tuple(urls[first : first + FAN_IN]), storage.join(work_folder, f"{name}-{first:07d}.tally.json")
        )
        for first in range(0, len(urls), FAN_IN)
    ]
    runner.run("adding up", _aggregate, tasks, lambda task: task.url, lambda task: len(task.urls), ("results", 1.0))
    return _sum(Tally.of_json(read_state(task.url)) for task in tasks)


def _sum(tallies: Iterable[Tally]) -> Tally:
    total = Tally()
    for tally in tallies:
        total += tally
    return total


def _aggregate(task: AggregationTask) -> None:
    write_state(task.url, _sum(map(task.tally_of, task.urls)).as_json())
