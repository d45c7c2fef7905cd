"""A phase of preparation: tasks whose result files say that they are done, run on an executor where they are not."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from data_prep.base.errors import UserError
from data_prep.base.progress import Progress
from data_prep.executors.executors import Executor, run_units
from data_prep.storage import storage
from data_prep.storage.locks import Lock

# A network file system may show a file of another machine's only a moment later.
_APPEARANCE_SECONDS = 10.0

Task = TypeVar("Task")


@dataclass(frozen=True)
class PhaseRunner:
    """Runs phases on an executor for as long as the output folder's lock is held."""

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
        """Do the tasks whose result is not there yet, the largest first, so that the workers end together.

        Args:
            result_url: where a task leaves its result, as its last act.
            amount: how much work a task is.
            unit: what `amount` counts, and by what it is divided to be shown: ("MB", 1e6).

        Raises:
            UserError: a task raised it, the lock was lost, or results do not lie where this process looks for them.
        """
        waiting = sorted(unfinished(tasks, result_url), key=amount, reverse=True)
        total = sum(map(amount, tasks))
        with Progress(title, total, *unit) as progress:
            progress.skip(total - sum(map(amount, waiting)))
            for task, _ in run_units(task_function, waiting, self.executor):
                self.lock.check()
                progress.add(amount(task))
        if waiting:
            _check_all_there(tasks, result_url)


def unfinished(tasks: Sequence[Task], result_url: Callable[[Task], str]) -> list[Task]:
    """The tasks without a result; every folder is listed once, so that an object store is not asked for each."""
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
                f"{storage.redact(result_url(missing[0]))} was written by a worker and is not there; workers on other "
                "machines need an --output that all of them share, such as a network folder or s3://"
            )
        time.sleep(0.2)
