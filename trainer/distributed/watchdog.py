"""Watchdog: reports a crashed or hung rank and ends the run on all ranks, instead of waiting in a collective forever.

The *beat* thread of each rank writes heartbeats to the store at the launcher's address: that the rank is alive, and
how far its main thread has come. Rank 0 reads the heartbeats of all ranks; the others read those of rank 0, and its
failure. The main thread triggers a heartbeat with each mark, so that the step of a killed rank is known. The *check*
thread only reads clocks, because a call to a store whose process is stopped never returns. A rank that was itself
stopped and then resumed restarts the timeouts of the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed

from trainer.config.run_settings import HealthSettings
from trainer.distributed.exit import (
    DISK_SECONDS,
    end_with_last_line,
    error_of_another,
    is_lost_peer,
    keep_flight_record,
    keep_stacks,
    within,
)
from trainer.distributed.process_group import Ranks
from trainer.distributed.rank_environment import RECORD_SECONDS
from trainer.distributed.rendezvous import LOST_RANK_EXIT_STATUS, Board, wait_for_answer

_TOPIC, _FAILURE = "watchdog", "failure"
_MAX_INTERVAL_SECONDS = 5.0
_MIN_INTERVAL_SECONDS = 0.1
_HEARTBEATS_PER_SECOND = 2000
"""Limit over all ranks, because one store takes them."""
_SETTING_UP = "setting up"
_STEP = re.compile(r"\bstep \d+")


@dataclass(frozen=True)
class Heartbeat:
    """A rank's state: number of the heartbeat, marks of its main thread, the current operation, host and process."""

    beat: int
    marks: int
    doing: str
    process: str
    patience_seconds: int = 0
    """Time limit of the operation, if longer than `health.step_timeout_seconds`."""


@dataclass(frozen=True)
class LastSeen:
    """The last heartbeat, and when its beat and its marks last changed, by this process's own clock (seconds)."""

    heartbeat: Heartbeat
    beat_at: float
    moved_at: float


def record(before: LastSeen | None, heartbeat: Heartbeat, now: float) -> LastSeen:
    """Record a heartbeat that was read at `now` (seconds)."""
    if before is None:
        return LastSeen(heartbeat, now, now)
    beat_at = now if heartbeat.beat != before.heartbeat.beat else before.beat_at
    moved_at = now if heartbeat.marks != before.heartbeat.marks else before.moved_at
    return LastSeen(heartbeat, beat_at, moved_at)


def find_trouble(last_seen: dict[int, LastSeen], now: float, settings: HealthSettings) -> str | None:
    """Describe the ranks without heartbeat; if all have one and none moves, those furthest behind."""
    silent = [rank for rank in last_seen if now - last_seen[rank].beat_at > settings.heartbeat_timeout_seconds]
    if silent:
        ranks = _describe(last_seen, silent, are_silent=True)
        return f"{ranks} sent no heartbeat for {settings.heartbeat_timeout_seconds} s: crashed, stopped or unreachable"
    patience = max(each.heartbeat.patience_seconds for each in last_seen.values())
    seconds = max(settings.step_timeout_seconds, patience)
    if all(now - each.moved_at > seconds for each in last_seen.values()):
        fewest = min(each.heartbeat.marks for each in last_seen.values())
        behind = [rank for rank in last_seen if last_seen[rank].heartbeat.marks == fewest]
        limit = (
            "health.step_timeout_seconds" if seconds == settings.step_timeout_seconds else "the limit of this operation"
        )
        problem = f"no rank made progress for {seconds} s ({limit})"
        if len(behind) < len(last_seen):
            return f"{problem}; {_describe(last_seen, behind)} did not reach the operation that the others wait for"
        return f"{problem}; all ranks hang in the same operation, see the stacks: {_describe(last_seen, behind[:1])}"
    return None


class Watchdog:
    """The watchdog of this rank, active from `start` to `close`."""

    def __init__(self, settings: HealthSettings, ranks: Ranks, stacks: Path | None = None) -> None:
        """`stacks` is the folder for all stacks."""
        self._settings, self._ranks, self._stacks = settings, ranks, stacks
        self.on_exit: Callable[[str], None] = lambda failure: None
        """Called with the failure before the process ends."""
        self._interval = min(_MAX_INTERVAL_SECONDS, settings.heartbeat_timeout_seconds / 6)
        self._min_interval = max(_MIN_INTERVAL_SECONDS, ranks.world_size / _HEARTBEATS_PER_SECOND)
        process = f"{socket.gethostname()}, process {os.getpid()}"
        self._own = Heartbeat(beat=0, marks=0, doing=_SETTING_UP, process=process)  # written by the main thread alone
        self._beat = 0  # written by the beat thread alone
        unseen = Heartbeat(beat=-1, marks=-1, doing="no operation yet", process="not seen yet")
        watched = range(ranks.world_size) if ranks.is_first else (0, ranks.rank)
        now = time.monotonic()
        self._last_seen = {rank: LastSeen(unseen, now, now) for rank in watched}
        self._failure: str | None = None
        self._failure_published = threading.Event()
        self._closing = threading.Event()
        self._marked = threading.Event()

    def start(self) -> None:
        """Start the beat thread and the check thread."""
        for target in (self._beat_loop, self._check_loop):
            threading.Thread(target=target, name=f"watchdog{target.__name__}", daemon=True).start()

    def mark(self, doing: str, patience_seconds: int = 0) -> None:
        """Record that the main thread starts an operation, which may take `patience_seconds` if that is longer."""
        self._own = replace(self._own, marks=self._own.marks + 1, doing=doing, patience_seconds=patience_seconds)
        self._marked.set()

    def activity(self) -> Heartbeat:
        """Return the operation of this rank's main thread, for its status."""
        return self._own

    def close(self) -> None:
        """Stop watching."""
        self._closing.set()
        self._marked.set()

    def end_run(self, failure: str) -> NoReturn:
        """End the run on all ranks with this rank's failure, such as the loss of a process that it cannot replace."""
        self._failure = self._failure or failure
        while True:  # the beat thread publishes the failure, the check thread ends the process
            time.sleep(self._interval)

    @contextlib.contextmanager
    def report_lost_ranks(self) -> Iterator[None]:
        """End the run if a collective fails within the block because ranks are lost; other errors propagate.

        Raises:
            UserError: another rank ended with this error.
        """
        try:
            yield
        except Exception as error:
            if is_lost_peer(error):
                if (cause := error_of_another()) is not None:
                    raise cause from None
                self.abort_if_ranks_are_lost()
            raise

    def abort_if_ranks_are_lost(self) -> None:
        """Wait for a few heartbeats after a failed collective, and end the run if ranks sent none.

        Returns if all ranks sent them. If there is a failure, the collective failed because other ranks exited on it.
        """
        try:
            board = Board(self._connect(), _TOPIC)
            before = _read_heartbeats(board, range(self._ranks.world_size))
            time.sleep(2.5 * self._interval)
            after = _read_heartbeats(board, range(self._ranks.world_size))
            self._failure = self._failure or board.read(_FAILURE)
            others = (rank for rank in range(self._ranks.world_size) if rank != self._ranks.rank)
            lost = [rank for rank in others if rank not in before or before[rank].beat == after[rank].beat]
            last_seen = {rank: LastSeen(heartbeat, 0.0, 0.0) for rank, heartbeat in after.items()}
        except RuntimeError:  # if a rank owns the store, it is rank 0
            lost, last_seen = [0], self._last_seen
        if lost and self._failure is None:
            last_seen = last_seen | {self._ranks.rank: LastSeen(self._own, 0.0, 0.0)}
            self._failure = f"{_describe(last_seen, lost, are_silent=True)} crashed or became unreachable"
        if self._failure is not None:
            time.sleep(3 * DISK_SECONDS + RECORD_SECONDS + 8 * self._interval)  # the check thread ends the process

    def _beat_loop(self) -> None:
        board, read_at = None, float("-inf")
        while not self._closing.is_set():
            try:
                board = board or Board(self._connect(), _TOPIC)
                self._marked.clear()
                self._beat += 1
                board.post(self._ranks.rank, json.dumps(vars(replace(self._own, beat=self._beat))))
                if time.monotonic() - read_at >= self._interval:
                    self._look_around(board)
                    read_at = time.monotonic()
            except RuntimeError:
                board = (
                    None  # the store's owner ended or is a new one; the check thread finds silent ranks by the clock
                )
            pause = min(self._min_interval, self._interval)
            if not self._closing.wait(pause):
                self._marked.wait(self._interval - pause)

    def _look_around(self, board: Board) -> None:
        heartbeats = _read_heartbeats(board, tuple(self._last_seen))
        now = time.monotonic()
        for rank, heartbeat in heartbeats.items():
            self._last_seen[rank] = record(self._last_seen[rank], heartbeat, now)
        self._exchange_failure(board)

    def _exchange_failure(self, board: Board) -> None:
        if self._failure is not None and not self._failure_published.is_set():
            board.post(_FAILURE, self._failure)
            self._failure_published.set()
        elif self._failure is None and (failure := board.read(_FAILURE)) is not None:
            self._failure = failure
            self._failure_published.set()

    def _check_loop(self) -> None:
        checked_at = time.monotonic()
        while not self._closing.wait(self._interval):
            now = time.monotonic()
            if now - checked_at > 4 * self._interval:
                self._last_seen = {rank: LastSeen(each.heartbeat, now, now) for rank, each in self._last_seen.items()}
            checked_at = now
            if self._failure is None:
                self._failure = find_trouble(self._watched(), now, self._settings)
            if self._failure is not None:
                self._abort(self._failure)

    def _watched(self) -> dict[int, LastSeen]:
        """Return what was seen of all watched ranks; this rank's own heartbeat is always current."""
        own = self._last_seen[self._ranks.rank]
        own = record(own, self._own, time.monotonic())
        self._last_seen[self._ranks.rank] = own
        return self._last_seen | {self._ranks.rank: replace(own, beat_at=time.monotonic())}

    def _abort(self, failure: str) -> None:
        """Log, record and publish the failure, and end the process; the failure is the last line of its output."""
        if self._closing.is_set():
            return
        # The first rank of a node prints the error for all of them, but it may be the lost one.
        opening = "error:" if self._ranks.local_rank == 0 else f"rank {self._ranks.rank} exits:"
        line = f"{opening} {failure}; all ranks exit. Fix: rerun the same command. [rank-lost]"
        print(line, file=sys.stderr, flush=True)
        # Written first: once a rank has exited, the collective fails that the stacks of the other ranks should show.
        keep_stacks(self._stacks, self._ranks.rank, f"{line}\nrank {self._ranks.rank}, {self._own.doing}, its stacks:")
        if self._ranks.device.type == "cuda" and self._stacks is not None:
            keep_flight_record(self._stacks, self._ranks.rank, RECORD_SECONDS)
        if (error := within(DISK_SECONDS, lambda: self.on_exit(failure))) is not None:
            print(f"rank {self._ranks.rank}: cannot record the failure on disk ({error})", file=sys.stderr, flush=True)
        self._failure_published.wait(2 * self._interval)
        if self._ranks.is_first:
            time.sleep(2 * self._interval)  # the store may live in this process: the others must have read it
        end_with_last_line(line, LOST_RANK_EXIT_STATUS)

    def _connect(self) -> torch.distributed.Store:
        """Return a separate connection to the store, so that a blocking call does not block the process group's."""
        if self._ranks.world_size == 1:
            return torch.distributed.HashStore()
        timeout = timedelta(seconds=self._settings.heartbeat_timeout_seconds)
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if isinstance(error := wait_for_answer(*address, seconds=0), ConnectionRefusedError):
            raise torch.distributed.DistNetworkError(str(error))  # torch's client would retry until the timeout
        return torch.distributed.TCPStore(*address, is_master=False, timeout=timeout)


def _read_heartbeats(board: Board, ranks: Iterable[int]) -> dict[int, Heartbeat]:
    """Return the heartbeats of the ranks that have sent one."""
    return {rank: Heartbeat(**json.loads(text)) for rank, text in board.read_all(ranks).items()}


def _describe(last_seen: dict[int, LastSeen], ranks: list[int], are_silent: bool = False) -> str:
    """Describe ranks, the first few with process and operation; for silent ones also where the other ranks are now."""
    described = [
        f"rank {rank} ({last_seen[rank].heartbeat.process}; last at {last_seen[rank].heartbeat.doing}"
        f"{_progress_of_others(last_seen, ranks, rank) if are_silent else ''})"
        if rank in last_seen
        else f"rank {rank}"
        for rank in ranks[:3]
    ]
    more = f" and {len(ranks) - 3} more ({', '.join(map(str, ranks[3:20]))})" if len(ranks) > 3 else ""
    return ", ".join(described) + more


def _progress_of_others(last_seen: dict[int, LastSeen], ranks: list[int], rank: int) -> str:
    """Describe where a rank outside `ranks` is, if that is another step than the last one of `rank`.

    All ranks take a step together, so a silent rank is in the same step or one behind.
    """
    others = [other for other in last_seen if other not in ranks]
    if not others:
        return ""
    newest = max(others, key=lambda other: last_seen[other].heartbeat.marks)
    doing, last = last_seen[newest].heartbeat.doing, last_seen[rank].heartbeat.doing
    step, last_step = _STEP.search(doing), _STEP.search(last)
    if step is None or (last_step is None and last != _SETTING_UP):
        return ""
    return "" if last_step is not None and step[0] == last_step[0] else f", while rank {newest} is at {doing}"
