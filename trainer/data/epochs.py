"""An epoch of a data set: the row at each position, and its contents.

Windows are planned when first needed and their plans dropped later, so memory does not grow with the data set. Only
sentence pairs need a plan of every shard at the start, to determine the number of rows, unless these were counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, fields, replace
from functools import lru_cache

import numpy as np

from trainer.data.assembly import RowSettings
from trainer.data.order import WINDOW_SHARDS, EpochOrder
from trainer.data.packing import DocumentRows, RowPlan, Segments, num_document_rows
from trainer.data.pair_counts import PairPlanner
from trainer.data.pair_rows import PairCounts, PairPlan, PairRows
from trainer.data.shard_set import Shard


class ComponentEpoch:
    """An epoch of one component: the same shards, settings and key give the same rows in the same order."""

    def __init__(
        self, shards: Sequence[Shard], settings: RowSettings, key: np.uint64, counts: np.ndarray | None = None
    ) -> None:
        """`counts` are those of the sentence pairs of all shards, (num_shards, `NUM_COUNTS`), where they are known."""
        self._shards = shards
        self._settings = settings
        self._planner, self._counts = PairPlanner(shards, settings, key), counts
        self._pair_plan = lru_cache(2 * WINDOW_SHARDS)(self._plan_pairs)
        self._window = lru_cache(2)(self._open_window)
        self.pair_counts: PairCounts | None = None
        """Counts of the sentence pairs, if there are any."""
        self._order = EpochOrder(self._count_rows(), key)

    @property
    def num_rows(self) -> int:
        return self._order.num_rows

    def segments_of_epoch(self, positions: np.ndarray) -> tuple[Segments, list[Shard]]:
        """Return the segments at `positions` (n,) int64 of the epoch, and their shards; rows count 0 to n - 1."""
        windows, rows = self._order.locate(positions)
        parts = []
        for window in np.unique(windows).tolist():
            members = np.flatnonzero(windows == window)
            segments = self._window(window).segments_of_rows(rows[members])
            parts.append((members, segments, [self._shards[number] for number in self._order.windows[window].tolist()]))
        return merge_segments(parts)

    def _count_rows(self) -> list[int]:
        if self._settings.pair_task is None:
            return [num_shard_rows(shard, self._settings) for shard in self._shards]
        counts = self._counts
        if counts is None:
            counts = np.array([astuple(self._pair_plan(number).counts) for number in range(len(self._shards))])
        self.pair_counts = PairCounts(*counts.sum(axis=0).tolist())
        return [PairCounts(*row).rows for row in counts.tolist()]

    def _plan_pairs(self, number: int) -> PairPlan:
        plan = self._planner.plan(number)
        if self._counts is not None:
            self._planner.check(number, plan, self._counts)
        return plan

    def _open_window(self, window: int) -> RowPlan:
        """Plan a window, and start to fetch or verify its shards and those of the next one."""
        for number in np.concatenate(self._order.windows[window : window + 2]).tolist():
            self._shards[number].prefetch()
        return self._plan_window(window)

    def _plan_window(self, window: int) -> RowPlan:
        numbers = self._order.windows[window].tolist()
        if self._settings.pair_task is not None:
            return PairRows([self._pair_plan(number) for number in numbers])
        shards = [self._shards[number] for number in numbers]
        indexes = [shard.read_index() for shard in shards]
        return DocumentRows(indexes, [shard.itemsize for shard in shards], self._settings.sequence_length)


def num_shard_rows(shard: Shard, settings: RowSettings) -> int:
    """Return the number of rows of a shard without sentence pairs."""
    return num_document_rows(shard.record.tokens, shard.record.documents, settings.sequence_length)


def merge_segments(parts: Sequence[tuple[np.ndarray, Segments, list[Shard]]]) -> tuple[Segments, list[Shard]]:
    """Join (row numbers, segments, shards) of several origins into one order of rows."""
    if not parts:
        return Segments(*(np.empty(0, np.int64) for _ in fields(Segments))), []
    shards: list[Shard] = []
    joined = []
    for members, segments, part_shards in parts:
        joined.append(replace(segments, rows=members[segments.rows], shards=segments.shards + len(shards)))
        shards += part_shards
    if len(joined) == 1:
        return joined[0], shards
    order = np.argsort(np.concatenate([segments.rows for segments in joined]), kind="stable")
    columns = {
        field.name: np.concatenate([getattr(segments, field.name) for segments in joined])[order]
        for field in fields(Segments)
    }
    return Segments(**columns), shards
