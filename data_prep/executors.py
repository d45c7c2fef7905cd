"""Running idempotent work units in several processes, and again where a process was killed.

A unit's task writes its result under a final name as its last act, so a unit may be done twice without harm.
Tasks keep what is dear to load (the tokenizer) in a cache of their own process.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from data_prep.errors import UserError

MAX_BROKEN_POOLS = 3

Unit = TypeVar("Unit")
Result = TypeVar("Result")


def default_num_workers() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_units(task: Callable[[Unit], Result], units: Sequence[Unit], num_workers: int) -> Iterator[tuple[Unit, Result]]:
    """Run the task on every unit and yield (unit, result) as they are done, in any order.

    With one worker the units run in this process, in order. Otherwise task, units and results travel to
    spawned processes and back, so they are picklable and `task` is a module's own function.

    Raises:
        UserError: a task raised it, or processes were killed `MAX_BROKEN_POOLS` times.
    """
    num_workers = min(num_workers, len(units))
    if num_workers <= 1:
        for unit in units:
            yield unit, task(unit)
        return
    unfinished = dict(enumerate(units))
    for broken_pools in range(1, MAX_BROKEN_POOLS + 1):
        try:
            for number, result in _run_in_pool(task, unfinished, num_workers):
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
        f"worker processes were killed {MAX_BROKEN_POOLS} times, which is mostly the system running out of "
        "memory; "
        "run the same command again with fewer --workers, it goes on from the finished units"
    )


def _run_in_pool(
    task: Callable[[Unit], Result], units: dict[int, Unit], num_workers: int
) -> Iterator[tuple[int, Result]]:
    # Spawned, not forked: forking a process that has threads (tokenizer, tqdm) may hang.
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(num_workers, mp_context=context, initializer=_begin_worker) as pool:
        try:
            futures = {pool.submit(task, unit): number for number, unit in units.items()}
            yield from _results(futures)
        except BaseException:
            # A unit may take minutes, and what it would write is of no use any more or will be written again.
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


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


def _begin_worker() -> None:
    """Leave Ctrl-C to the parent, and end with it: a pool's process waits for ever where its parent was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
