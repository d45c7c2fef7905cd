"""Worker processes of the loader: waiting for them, their signals, and the error when one is lost."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, TracebackType
from typing import Any, NoReturn, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from data_prep.base.errors import print_traceback
from data_prep.storage.storage_options import with_these_options

Item = TypeVar("Item")

_LOST = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (?P<pids>[\d, ]+)\) "
    r"(?:is killed by signal: (?P<signal>[^.]+)|exited unexpectedly)"
)
"""Message of torch, raised by its SIGCHLD handler at any point of the rank, or while it waits for the batch."""

LOSS_SECONDS = 5.0
"""Longest time between a broken connection to a worker and the signal that the worker was killed."""
_SCHEDULER_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
_POLL_SECONDS = 0.5


class ReadingStopped(Exception):
    """A stop was requested before a batch was read."""


def start_reading(
    data: Dataset[Item],
    order: Iterable[Any],
    num_workers: int,
    prefetch: int,
    *,
    begin: Callable[[int], None] | None = None,
    pin_memory: bool = False,
) -> Iterator[Item]:
    """Start worker processes that read the items of `data` in an order; with `num_workers=0` this process reads them.

    Args:
        prefetch: items that each worker reads ahead.
        begin: called in each worker with its number, instead of `initialize_worker`.
    """
    with block_scheduler_signals():
        return iter(
            DataLoader(
                data,
                batch_size=None,
                sampler=order,
                num_workers=num_workers,
                prefetch_factor=prefetch if num_workers else None,
                # A forked worker starts at once and inherits the plans. It uses neither CUDA nor torch's threads
                # (DataLoader sets one thread), which do not survive a fork.
                multiprocessing_context="fork" if num_workers else None,
                worker_init_fn=begin or initialize_worker,
                collate_fn=_unchanged,
                pin_memory=pin_memory,
                # Starting a DataLoader draws a seed: from this generator, so that the run's random state is unchanged.
                generator=torch.Generator(),
            )
        )


def _unchanged(item: Any) -> Any:
    """Return the item: without a batch size `DataLoader` passes single ones."""
    return item


def next_or_stop(batches: Iterator[Item], should_stop: Callable[[], bool] | None) -> Item:
    """Return the next batch; with `should_stop` another thread reads it, so that a store cannot delay a stop.

    Raises:
        ReadingStopped: the stop came first; `batches` are of no use any more.
    """
    if should_stop is None:
        return next(batches)
    results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def read() -> None:
        try:
            results.put((next(batches), None))
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            results.put((None, error))

    threading.Thread(target=with_these_options(read), name="read", daemon=True).start()
    while True:
        try:
            item, error = results.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            if not should_stop():
                continue
            for worker in getattr(batches, "_workers", ()):  # of a DataLoader, which may wait for the store too
                worker.terminate()
            raise ReadingStopped from None
        if error is not None:
            raise error
        return item  # type: ignore[no-any-return]  # of whatever type the batches are


@contextlib.contextmanager
def block_scheduler_signals() -> Iterator[None]:
    """Block scheduler signals while workers start: all their threads inherit the mask, also those that torch starts.

    One thread without it would be enough for SIGTERM to end the worker. Meanwhile a signal to the rank reaches another
    thread of the rank, or waits.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SCHEDULER_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def initialize_worker(worker: int) -> None:
    """Make a worker ignore signals to every process of the job, and the end of its own rank.

    The rank ends its step and saves on such a signal, and needs its workers for that. A worker ends when its rank
    sends SIGTERM or is gone (DataLoader's own watch), and prints nothing about it: the rank's error is the last line
    of its log. The worker must be started within `block_scheduler_signals`.
    """
    sys.excepthook = _print_unless_rank_is_gone
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # Replaces torch's handler, which ends the worker in any thread that receives the signal.
    signal.signal(signal.SIGTERM, _pass_by)
    threading.Thread(target=_wait_for_rank, args=(os.getppid(),), daemon=True).start()


def _pass_by(signum: int, frame: FrameType | None) -> None:
    """Handle a scheduler's SIGTERM in a thread that does not block it."""


def _print_unless_rank_is_gone(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an uncaught error, as those of the thread that hands batches over, unless the rank broke the connection."""
    if not isinstance(error, (ConnectionError, EOFError)):
        print_traceback(kind, error, trace)


def _wait_for_rank(rank_pid: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank_pid:
        pass
    os._exit(0)


@contextlib.contextmanager
def explain_lost_workers(rank: int, num_workers: int, end_run: Callable[[str], NoReturn]) -> Iterator[None]:
    """End the run on all ranks if a worker of this rank was killed or crashed; other errors propagate."""
    try:
        yield
    except (OSError, EOFError, RuntimeError) as error:
        loss = error if isinstance(error, RuntimeError) or not num_workers else _wait_for_loss(error)
        if (description := describe_lost_worker(loss, rank, num_workers)) is not None:
            end_run(description)
        raise


def _wait_for_loss(error: OSError | EOFError) -> BaseException:
    """Return torch's error about a lost worker if it comes in time, else the given one.

    A killed worker's connections break before the rank receives SIGCHLD, whose handler raises torch's error.
    """
    try:
        time.sleep(LOSS_SECONDS)
    except RuntimeError as lost:
        return lost
    return error


def describe_lost_worker(error: BaseException | None, rank: int, num_workers: int) -> str | None:
    """Describe the lost worker, the probable cause and the fix; None if the error is not about a worker."""
    while error is not None and (match := _LOST.search(str(error))) is None:
        error = error.__cause__ or error.__context__
    if error is None or match is None:
        return None
    lower = f"lower data.num_workers={num_workers}"
    reason, fix = "probably because the host ran out of memory", f"{lower}, or give the host more memory"
    if match["signal"] == "Bus error":
        reason, fix = "probably because /dev/shm is full", f"enlarge /dev/shm, or {lower}"
    elif match["signal"] not in (None, "Killed"):
        reason, fix = "read its own message above", f"{lower}; with 0 the rank process builds the batches"
    ended = f"was killed by a signal ({match['signal']})" if match["signal"] else "ended unexpectedly"
    processes = f"process {match['pids']} on {socket.gethostname()}"
    return f"a data worker of rank {rank} ({processes}) {ended}, {reason}. Fix: {fix}"
