"""Sums over the results of finished tasks, computed by the workers: no process reads all results one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from data_prep.executors.phases import PhaseRunner
from data_prep.storage import storage
from data_prep.storage.sealed_files import read_state, write_state

FAN_IN = 128
"""Results that one process adds up."""


@dataclass(frozen=True)
class AggregationTask:
    """Results to add up, and the file of the sum.

    Attributes:
        add_up: a module-level function of URLs of results that returns a JSON value.
    """

    add_up: Callable[[Sequence[str]], Any]
    urls: tuple[str, ...]
    url: str


def add_up_results(
    urls: Sequence[str],
    add_up: Callable[[Sequence[str]], Any],
    work_folder: str,
    name: str,
    runner: PhaseRunner,
) -> list[Any]:
    """Return sums of at most `FAN_IN` results each, in order; this process adds up few results itself.

    Args:
        name: of the files of the sums in the work folder; different results need different names.

    Raises:
        UserError: a result differs from what was written.
    """
    if len(urls) <= FAN_IN:
        return [add_up(urls)]
    tasks = [
        AggregationTask(
            add_up, tuple(urls[first : first + FAN_IN]), storage.join(work_folder, f"{name}-{first:07d}.json")
        )
        for first in range(0, len(urls), FAN_IN)
    ]
    runner.run("adding up", _aggregate, tasks, lambda task: task.url, lambda task: len(task.urls), ("results", 1.0))
    return [read_state(task.url) for task in tasks]


def _aggregate(task: AggregationTask) -> None:
    write_state(task.url, task.add_up(task.urls))
