"""Naming a rank that died or hangs, and ending the run on all ranks instead of waiting in a collective for ever.

Each rank's *talking* thread tells the store beside the process group (the one that the launcher's address names) that
it lives and how far its main thread has come. Rank 0 reads what all say, the others read rank 0's word and its
verdict. A *judging* thread looks at clocks only, for talking to a store whose process is stopped never returns. A rank
that was itself stopped and goes on gives the others their time again.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NoReturn

import torch.distributed

from data_prep.errors import UserError
from trainer.ranks.distributed import Ranks
from trainer.ranks.leaving import error_of_another, is_lost_peer
from trainer.ranks.meeting import LOST_RANK_EXIT_STATUS
from trainer.settings.watching import HealthSettings

_PREFIX = "clozeworks/watchdog"
_MAX_INTERVAL_SECONDS = 5.0
_PATIENCE_WITH_DISK_SECONDS = 5.0


@dataclass(frozen=True)
class Word:
    """What a rank last said of itself: how often it has spoken, its main thread's marks, where it is."""

    beat: int
    marks: int
    doing: str
    place: str


@dataclass(frozen=True)
class Heard:
    """A word, and when it last differed, by this process's own clock."""

    word: Word
    beat_at: float
    moved_at: float


def hear(before: Heard | None, word: Word, now: float) -> Heard:
    """Take note of a word that was read at `now` (seconds)."""
    if before is None:
        return Heard(word, now, now)
    beat_at = now if word.beat != before.word.beat else before.beat_at
    moved_at = now if word.marks != before.word.marks else before.moved_at
    return Heard(word, beat_at, moved_at)


def find_trouble(heard: dict[int, Heard], now: float, settings: HealthSettings) -> str | None:
    """Name the ranks that do not beat any more; where all beat and none moves, those that are furthest behind."""
    silent = [rank for rank in heard if now - heard[rank].beat_at > settings.heartbeat_timeout_seconds]
    if silent:
        what = f"not been heard of for {settings.heartbeat_timeout_seconds} s: dead, stopped, or its host is cut off"
        return f"{_named(heard, silent)} has {what}"
    if all(now - each.moved_at > settings.step_timeout_seconds for each in heard.values()):
        fewest = min(each.word.marks for each in heard.values())
        behind = [rank for rank in heard if heard[rank].word.marks == fewest]
        what = f"no rank has got on with its work for {settings.step_timeout_seconds} s (health.step_timeout_seconds)"
        if len(behind) < len(heard):
            return f"{what}; {_named(heard, behind)} did not arrive where the others wait"
        return f"{what}; all are at the same place, see the stacks: {_named(heard, behind[:1])}"
    return None


class Watchdog:
    """This rank's part of the watch, from `start` to `close`."""

    def __init__(self, settings: HealthSettings, ranks: Ranks, on_leaving: Callable[[str], None] | None = None) -> None:
        """`on_leaving` is told the verdict before the process ends."""
        self._settings, self._ranks, self._on_leaving = settings, ranks, on_leaving
        self._interval = min(_MAX_INTERVAL_SECONDS, settings.heartbeat_timeout_seconds / 6)
        place = f"{socket.gethostname()}, process {os.getpid()}"
        self._own = Word(beat=0, marks=0, doing="setting up", place=place)  # written by the main thread alone
        self._beat = 0  # written by the talking thread alone
        unseen = Word(beat=-1, marks=-1, doing="nothing yet", place="not seen yet")
        watched = range(ranks.world_size) if ranks.is_first else (0, ranks.rank)
        now = time.monotonic()
        self._heard = {rank: Heard(unseen, now, now) for rank in watched}
        self._verdict: str | None = None
        self._verdict_published = threading.Event()
        self._closing = threading.Event()

    def start(self) -> None:
        """Begin to talk and to judge."""
        for target in (self._talk, self._judge):
            threading.Thread(target=target, name=f"watchdog{target.__name__}", daemon=True).start()

    def mark(self, doing: str) -> None:
        """The main thread gets on, and says with what."""
        self._own = replace(self._own, marks=self._own.marks + 1, doing=doing)

    def close(self) -> None:
        """Watch no more: the run ends."""
        self._closing.set()

    def end_run(self, verdict: str) -> NoReturn:
        """End the run on all ranks with a verdict of this one, such as the loss of a process that it cannot replace."""
        self._verdict = self._verdict or verdict
        while True:  # the talking thread tells the others, the judging thread ends the process
            time.sleep(self._interval)

    @contextlib.contextmanager
    def naming_lost_ranks(self) -> Iterator[None]:
        """Where a collective fails within it, end the run over the ranks that are lost; else the error goes on.

        Raises:
            UserError: a rank has left with an error of its own, which is told here too.
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
            heard = {rank: Heard(word, 0.0, 0.0) for rank, word in after.items()}
        except RuntimeError:  # the store's keeper, if it is a rank, is the first
            lost, heard = [0], self._heard
        if lost and self._verdict is None:
            self._verdict = f"{_named(heard, lost)} is not there any more"
        if self._verdict is not None:
            time.sleep(_PATIENCE_WITH_DISK_SECONDS + 8 * self._interval)  # the judging thread ends the process

    def _talk(self) -> None:
        store = None
        while not self._closing.is_set():
            try:
                store = store or self._connect()
                self._beat += 1
                store.set(f"{_PREFIX}/{self._ranks.rank}", json.dumps(vars(replace(self._own, beat=self._beat))))
                words = self._read_all(store, tuple(self._heard))
                now = time.monotonic()
                for rank, word in words.items():
                    self._heard[rank] = hear(self._heard[rank], word, now)
                self._exchange_verdict(store)
            except RuntimeError:
                store = None  # its keeper is gone, or a new one; who is not heard of is judged by the clock
            self._closing.wait(self._interval)

    def _exchange_verdict(self, store: torch.distributed.Store) -> None:
        key = f"{_PREFIX}/verdict"
        if self._verdict is not None and not self._verdict_published.is_set():
            store.set(key, self._verdict)
            self._verdict_published.set()
        elif self._verdict is None and store.check([key]):
            self._verdict = store.get(key).decode()
            self._verdict_published.set()

    def _judge(self) -> None:
        looked_at = time.monotonic()
        while not self._closing.wait(self._interval):
            now = time.monotonic()
            if now - looked_at > 4 * self._interval:
                self._heard = {rank: Heard(each.word, now, now) for rank, each in self._heard.items()}
            looked_at = now
            if self._verdict is None:
                self._verdict = find_trouble(self._others(), now, self._settings)
            if self._verdict is not None:
                self._leave(self._verdict)

    def _others(self) -> dict[int, Heard]:
        """All that is watched, with this rank's own word as it is: nobody is silent to himself."""
        own = self._heard[self._ranks.rank]
        own = hear(own, self._own, time.monotonic())
        self._heard[self._ranks.rank] = own
        return self._heard | {self._ranks.rank: replace(own, beat_at=time.monotonic())}

    def _leave(self, verdict: str) -> None:
        """Tell the log, the disk and the others, and end the process."""
        if self._closing.is_set():
            return
        # One rank of a node speaks for it, but it may be the one that is lost.
        opening = "error:" if self._ranks.local_rank == 0 else f"rank {self._ranks.rank} leaves:"
        print(f"{opening} {verdict}; all ranks leave, start the same command again", file=sys.stderr, flush=True)
        # At once: the first rank that is gone fails the collective that the stacks of the others are to show.
        print(f"rank {self._ranks.rank}, {self._own.doing}, its stacks:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.stderr)
        if self._on_leaving is not None:  # in a thread: a disk that hangs may be the trouble
            thread = threading.Thread(target=self._on_leaving, args=(verdict,), daemon=True)
            thread.start()
            thread.join(_PATIENCE_WITH_DISK_SECONDS)
        self._verdict_published.wait(2 * self._interval)
        if self._ranks.is_first:
            time.sleep(2 * self._interval)  # the store may live in this process: the others must have read it
        os._exit(LOST_RANK_EXIT_STATUS)

    def _connect(self) -> torch.distributed.Store:
        """A connection of our own: one that blocks must not keep the process group's from its work."""
        if self._ranks.world_size == 1:
            return torch.distributed.HashStore()
        timeout = timedelta(seconds=self._settings.heartbeat_timeout_seconds)
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return torch.distributed.TCPStore(*address, is_master=False, timeout=timeout)

    def _read_all(self, store: torch.distributed.Store, ranks: tuple[int, ...] | None = None) -> dict[int, Word]:
        """The words of those (by default all) ranks that have spoken."""
        ranks = tuple(range(self._ranks.world_size)) if ranks is None else ranks
        # Asked for a key that is not there, a store waits; one that was there once stays.
        seen = [rank for rank in ranks if self._has_spoken(store, rank)]
        values = store.multi_get([f"{_PREFIX}/{rank}" for rank in seen]) if seen else []
        return {rank: Word(**json.loads(value)) for rank, value in zip(seen, values, strict=True)}

    def _has_spoken(self, store: torch.distributed.Store, rank: int) -> bool:
        known = self._heard.get(rank)
        return (known is not None and known.word.beat >= 0) or store.check([f"{_PREFIX}/{rank}"])


def _named(heard: dict[int, Heard], ranks: list[int]) -> str:
    """Ranks in words, the first few with place and work."""
    shown = [
        f"rank {rank} ({heard[rank].word.place}; last at {heard[rank].word.doing})" if rank in heard else f"rank {rank}"
        for rank in ranks[:3]
    ]
    more = f" and {len(ranks) - 3} more ({', '.join(map(str, ranks[3:20]))})" if len(ranks) > 3 else ""
    return ", ".join(shown) + more
