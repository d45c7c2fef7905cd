"""A phase of preparation: runs the tasks whose result files do not exist yet on an executor, and adds up their results.

Many results are added up by the workers: no process reads all of them one by one.
"""

from __future__ import annotations

import base64
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from data_prep.base.errors import UserError
from data_prep.base.progress import Progress
from data_prep.executors.executors import Executor, num_processes, run_units
from data_prep.storage import storage
from data_prep.storage.locks import Lock
from data_prep.storage.work_files import read_state, write_state

# A network file system may show a file of another machine with a delay.
_APPEARANCE_SECONDS = 10.0

Task = TypeVar("Task")
Counts = Counter[tuple[str | int, ...]]


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
    """
    if len(urls) <= FAN_IN:
        return _sum(map(tally_of, urls))
    tasks = [
        AggregationTask(
            tally_of, tuple(urls[first : first + FAN_IN]), storage.join(work_folder, f"{name}-{first:07d}.counts.json")
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


@dataclass
class Tally:
    """What tasks counted; `+=` adds what others counted, in the order of the tasks.

    Attributes:
        counts: by a name and what is counted, such as ("dropped", 2, "deduplication", "duplicate") of the source 2.
        arrays: int64 counts by name, of one shape in all tasks.
        lists: JSON values by name.
    """

    counts: Counts = field(default_factory=Counter)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    lists: dict[str, list[Any]] = field(default_factory=dict)

    def __iadd__(self, other: Tally) -> Tally:
        self.counts.update(other.counts)
        for name, array in other.arrays.items():
            self.arrays[name] = self.arrays.get(name, 0) + array
        for name, values in other.lists.items():
            self.lists.setdefault(name, []).extend(values)
        return self

    def of(self, name: str) -> Counter[Any]:
        """Return the counts of a name by the one thing that is counted, such as the number of a source."""
        return Counter({key[1]: count for key, count in self.counts.items() if key[0] == name})

    def as_json(self) -> dict[str, Any]:
        return {
            "counts": [[*key, count] for key, count in self.counts.items()],
            "arrays": {name: {"shape": each.shape, **pack_counts(each)} for name, each in self.arrays.items()},
            "lists": self.lists,
        }

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Tally:
        counts = Counter({(*key,): count for *key, count in values["counts"]})
        arrays = {name: unpack_counts(each).reshape(each["shape"]) for name, each in values["arrays"].items()}
        return cls(counts, arrays, values["lists"])


def pack_counts(counts: np.ndarray) -> dict[str, str]:
    """Return int64 counts, none negative, as JSON values that take less time than a list of numbers."""
    dtype = np.min_scalar_type(counts.max(initial=0)).newbyteorder("<")
    return {"dtype": dtype.str, "base64": base64.b64encode(counts.astype(dtype).tobytes()).decode()}


def unpack_counts(values: Mapping[str, str]) -> np.ndarray:
    """Return the counts of `pack_counts`, (n,) int64."""
    return np.frombuffer(base64.b64decode(values["base64"]), values["dtype"]).astype(np.int64)
