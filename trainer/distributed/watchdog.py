"""Naming a rank that died or hangs, and ending the run on all ranks instead of waiting in a collective for ever.

Each rank's *talking* thread tells the store beside the process group (the one that the launcher's address names) that
it lives and how far its main thread has come. Rank 0 reads what all say, the others read rank 0's word and its
verdict. It does so whenever the main thread gets on, so that a rank that is killed is known by the step that it was
in. A *judging* thread looks at clocks only, for talking to a store whose process is stopped never returns. A rank
that was itself stopped and goes on gives the others their time again.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed

from data_prep.base.errors import UserError
from trainer.config.run_settings import HealthSettings
from trainer.distributed.exit import end_with_last_line, error_of_another, is_lost_peer
from trainer.distributed.process_group import Ranks
from trainer.distributed.rendezvous import LOST_RANK_EXIT_STATUS, wait_for_answer
from trainer.distributed.stacks import DISK_SECONDS, RECORD_SECONDS, keep_flight_record, keep_stacks, within

_PREFIX = "clozeworks/watchdog"
_MAX_INTERVAL_SECONDS = 5.0
_MIN_INTERVAL_SECONDS = 0.1
_WORDS_PER_SECOND = 2000
"""Of all ranks together, which one store keeps."""
_SETTING_UP = "setting up"
_STEP = re.compile(r"\bstep \d+")


@dataclass(frozen=True)
class Heartbeat:
    """What a rank last said of itself: how often it has spoken, its main thread's marks, where it is."""

    beat: int
    marks: int
    doing: str
    place: str
    patience_seconds: int = 0
    """How long what it does may take, where that is more than `health.step_timeout_seconds`."""


@dataclass(frozen=True)
class LastSeen:
    """A word, and when it last differed, by this process's own clock."""

    word: Heartbeat
    beat_at: float
    moved_at: float


def record(before: LastSeen | None, word: Heartbeat, now: float) -> LastSeen:
    """Take note of a word that was read at `now` (seconds)."""
    if before is None:
        return LastSeen(word, now, now)
    beat_at = now if word.beat != before.word.beat else before.beat_at
    moved_at = now if word.marks != before.word.marks else before.moved_at
    return LastSeen(word, beat_at, moved_at)


def find_trouble(heard: dict[int, LastSeen], now: float, settings: HealthSettings) -> str | None:
    """Name the ranks that do not beat any more; where all beat and none moves, those that are furthest behind."""
    silent = [rank for rank in heard if now - heard[rank].beat_at > settings.heartbeat_timeout_seconds]
    if silent:
        what = f"not been heard of for {settings.heartbeat_timeout_seconds} s: dead, stopped, or its host is cut off"
        return f"{_named(heard, silent, are_silent=True)} has {what}"
    patience = max(each.word.patience_seconds for each in heard.values())
    seconds = max(settings.step_timeout_seconds, patience)
    if all(now - each.moved_at > seconds for each in heard.values()):
        fewest = min(each.word.marks for each in heard.values())
        behind = [rank for rank in heard if heard[rank].word.marks == fewest]
        limit = "health.step_timeout_seconds" if seconds == settings.step_timeout_seconds else "a limit on compilation"
        what = f"no rank has got on with its work for {seconds} s ({limit})"
        if len(behind) < len(heard):
            return f"{what}; {_named(heard, behind)} did not arrive where the others wait"
        return f"{what}; all are at the same place, see the stacks: {_named(heard, behind[:1])}"
    return None


class Watchdog:
    """This rank's part of the watch, from `start` to `close`."""

    def __init__(
        self,
        settings: HealthSettings,
        ranks: Ranks,
        on_leaving: Callable[[str], None] | None = None,
        stacks: Path | None = None,
    ) -> None:
        """`on_leaving` is called with the verdict before the process ends; `stacks` is the folder for all stacks."""
        self._settings, self._ranks, self._stacks = settings, ranks, stacks
        self.on_leaving = on_leaving
        self._interval = min(_MAX_INTERVAL_SECONDS, settings.heartbeat_timeout_seconds / 6)
        self._min_interval = max(_MIN_INTERVAL_SECONDS, ranks.world_size / _WORDS_PER_SECOND)
        place = f"{socket.gethostname()}, process {os.getpid()}"
        self._own = Heartbeat(beat=0, marks=0, doing=_SETTING_UP, place=place)  # written by the main thread alone
        self._beat = 0  # written by the talking thread alone
        unseen = Heartbeat(beat=-1, marks=-1, doing="nothing yet", place="not seen yet")
        watched = range(ranks.world_size) if ranks.is_first else (0, ranks.rank)
        now = time.monotonic()
        self._heard = {rank: LastSeen(unseen, now, now) for rank in watched}
        self._verdict: str | None = None
        self._verdict_published = threading.Event()
        self._closing = threading.Event()
        self._marked = threading.Event()

    def start(self) -> None:
        """Begin to talk and to judge."""
        for target in (self._beat_loop, self._check_loop):
            threading.Thread(target=target, name=f"watchdog{target.__name__}", daemon=True).start()

    def mark(self, doing: str, patience_seconds: int = 0) -> None:
        """The main thread gets on, and says with what, and with `patience_seconds` how long it may well take."""
        self._own = replace(self._own, marks=self._own.marks + 1, doing=doing, patience_seconds=patience_seconds)
        self._marked.set()

    def close(self) -> None:
        """Watch no more: the run ends."""
        self._closing.set()
        self._marked.set()

    def end_run(self, verdict: str) -> NoReturn:
        """End the run on all ranks with a verdict of this one, such as the loss of a process that it cannot replace."""
        self._verdict = self._verdict or verdict
        while True:  # the talking thread tells the others, the judging thread ends the process
            time.sleep(self._interval)

    @contextlib.contextmanager
    def report_lost_ranks(self) -> Iterator[None]:
        """Where a collective fails within it, end the run over the ranks that are lost; else the error goes on.

        Raises:
            UserError: a rank has left with an error of its own, which is raised here too.
        """
        try:
            yield
        except Exception as error:
            if is_lost_peer(error):
                if (told := error_of_another(self._ranks.world_size)) is not None:
                    raise UserError(told) from None
                self.leave_if_ranks_are_lost()
            raise

    def leave_if_ranks_are_lost(self) -> None:
        """After a collective failed: wait for a few beats, and end the run over ranks that have none.

        Returns where all ranks have them. Where there is a verdict, the collective failed because others left on it.
        """
        try:
            store = self._connect()
            before = self._read_all(store)
            time.sleep(2.5 * self._interval)
            after = self._read_all(store)
            if self._verdict is None and store.check([f"{_PREFIX}/verdict"]):
                self._verdict = store.get(f"{_PREFIX}/verdict").decode()
            others = (rank for rank in range(self._ranks.world_size) if rank != self._ranks.rank)
            lost = [rank for rank in others if rank not in before or before[rank].beat == after[rank].beat]
            heard = {rank: LastSeen(word, 0.0, 0.0) for rank, word in after.items()}
        except RuntimeError:  # the store's keeper, if it is a rank, is the first
            lost, heard = [0], self._heard
        if lost and self._verdict is None:
            heard = heard | {self._ranks.rank: LastSeen(self._own, 0.0, 0.0)}
            self._verdict = f"{_named(heard, lost, are_silent=True)} is not there any more"
        if self._verdict is not None:
            time.sleep(3 * DISK_SECONDS + RECORD_SECONDS + 8 * self._interval)  # the judging thread ends the process

    def _beat_loop(self) -> None:
        store, read_at = None, float("-inf")
        while not self._closing.is_set():
            try:
                store = store or self._connect()
                self._marked.clear()
                self._beat += 1
                store.set(f"{_PREFIX}/{self._ranks.rank}", json.dumps(vars(replace(self._own, beat=self._beat))))
                if time.monotonic() - read_at >= self._interval:
                    self._listen(store)
                    read_at = time.monotonic()
            except RuntimeError:
                store = None  # its keeper is gone, or a new one; who is not heard of is judged by the clock
            pause = min(self._min_interval, self._interval)
            if not self._closing.wait(pause):
                self._marked.wait(self._interval - pause)

    def _listen(self, store: torch.distributed.Store) -> None:
        words = self._read_all(store, tuple(self._heard))
        now = time.monotonic()
        for rank, word in words.items():
            self._heard[rank] = record(self._heard[rank], word, now)
        self._exchange_verdict(store)

    def _exchange_verdict(self, store: torch.distributed.Store) -> None:
        key = f"{_PREFIX}/verdict"
        if self._verdict is not None and not self._verdict_published.is_set():
            store.set(key, self._verdict)
            self._verdict_published.set()
        elif self._verdict is None and store.check([key]):
            self._verdict = store.get(key).decode()
            self._verdict_published.set()

    def _check_loop(self) -> None:
        looked_at = time.monotonic()
        while not self._closing.wait(self._interval):
            now = time.monotonic()
            if now - looked_at > 4 * self._interval:
                self._heard = {rank: LastSeen(each.word, now, now) for rank, each in self._heard.items()}
            looked_at = now
            if self._verdict is None:
                self._verdict = find_trouble(self._others(), now, self._settings)
            if self._verdict is not None:
                self._leave(self._verdict)

    def _others(self) -> dict[int, LastSeen]:
        """All that is watched, with this rank's own word as it is: nobody is silent to himself."""
        own = self._heard[self._ranks.rank]
        own = record(own, self._own, time.monotonic())
        self._heard[self._ranks.rank] = own
        return self._heard | {self._ranks.rank: replace(own, beat_at=time.monotonic())}

    def _leave(self, verdict: str) -> None:
        """Tell the log, the disk and the others, and end the process; the verdict is the last line of its output."""
        if self._closing.is_set():
            return
        # One rank of a node speaks for it, but it may be the one that is lost.
        opening = "error:" if self._ranks.local_rank == 0 else f"rank {self._ranks.rank} leaves:"
        line = f"{opening} {verdict}; all ranks leave, start the same command again"
        print(line, file=sys.stderr, flush=True)
        # At once: the first rank that is gone fails the collective that the stacks of the others are to show.
        keep_stacks(self._stacks, self._ranks.rank, f"{line}\nrank {self._ranks.rank}, {self._own.doing}, its stacks:")
        if self._ranks.device.type == "cuda" and self._stacks is not None:
            keep_flight_record(self._stacks, self._ranks.rank, RECORD_SECONDS)
        on_leaving = self.on_leaving or (lambda verdict: None)
        if (error := within(DISK_SECONDS, lambda: on_leaving(verdict))) is not None:
            print(f"rank {self._ranks.rank}: its end is not noted on disk ({error})", file=sys.stderr, flush=True)
        self._verdict_published.wait(2 * self._interval)
        if self._ranks.is_first:
            time.sleep(2 * self._interval)  # the store may live in this process: the others must have read it
        end_with_last_line(line, LOST_RANK_EXIT_STATUS)

    def _connect(self) -> torch.distributed.Store:
        """A connection of our own: one that blocks must not keep the process group's from its work."""
        if self._ranks.world_size == 1:
            return torch.distributed.HashStore()
        timeout = timedelta(seconds=self._settings.heartbeat_timeout_seconds)
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if isinstance(error := wait_for_answer(*address, seconds=0), ConnectionRefusedError):
            raise torch.distributed.DistNetworkError(str(error))  # torch's client would try for the whole timeout
        return torch.distributed.TCPStore(*address, is_master=False, timeout=timeout)

    def _read_all(self, store: torch.distributed.Store, ranks: tuple[int, ...] | None = None) -> dict[int, Heartbeat]:
        """The words of those (by default all) ranks that have spoken."""
        ranks = tuple(range(self._ranks.world_size)) if ranks is None else ranks
        # Asked for a key that is not there, a store waits; one that was there once stays.
        seen = [rank for rank in ranks if self._has_spoken(store, rank)]
        values = store.multi_get([f"{_PREFIX}/{rank}" for rank in seen]) if seen else []
        return {rank: Heartbeat(**json.loads(value)) for rank, value in zip(seen, values, strict=True)}

    def _has_spoken(self, store: torch.distributed.Store, rank: int) -> bool:
        known = self._heard.get(rank)
        return (known is not None and known.word.beat >= 0) or store.check([f"{_PREFIX}/{rank}"])


def _named(heard: dict[int, LastSeen], ranks: list[int], are_silent: bool = False) -> str:
    """Ranks in words, the first few with place and work; for silent ones, how far the others have come since."""
    shown = [
        f"rank {rank} ({heard[rank].word.place}; last at {heard[rank].word.doing}"
        f"{_further(heard, ranks, rank) if are_silent else ''})"
        if rank in heard
        else f"rank {rank}"
        for rank in ranks[:3]
    ]
    more = f" and {len(ranks) - 3} more ({', '.join(map(str, ranks[3:20]))})" if len(ranks) > 3 else ""
    return ", ".join(shown) + more


def _further(heard: dict[int, LastSeen], ranks: list[int], rank: int) -> str:
    """Where a rank that is not among those named waits now, if in another step than `rank` said last.

    All ranks take a step together, so the silent one has come as far, or is one step behind.
    """
    others = [other for other in heard if other not in ranks]
    if not others:
        return ""
    newest = max(others, key=lambda other: heard[other].word.marks)
    doing, last = heard[newest].word.doing, heard[rank].word.doing
    step, last_step = _STEP.search(doing), _STEP.search(last)
    if step is None or (last_step is None and last != _SETTING_UP):
        return ""
    return "" if last_step is not None and step[0] == last_step[0] else f", while rank {newest} is at {doing}"
