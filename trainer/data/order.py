"""Order of the rows of an epoch, their contents, and the order of the components of a mixture.

Shards are permuted, and rows are permuted within windows of 16 shards, so that a reader needs few shards at a time,
each only once. Both are pure functions of a key and the row counts of the shards. Windows are planned when first needed
and their plans dropped later, so memory does not grow with the data set. Only sentence pairs need a plan of every shard
at the start, to determine the number of rows, unless these were counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, fields, replace
from functools import lru_cache

import numpy as np

from data_prep.base.errors import UsageError
from trainer.data.packing import DocumentRows, RowPlan, RowSettings, Segments, num_document_rows
from trainer.data.pair_counts import PairPlanner
from trainer.data.pair_rows import PairCounts, PairPlan, PairRows
from trainer.data.randomness import Purpose, fold, permute
from trainer.data.shard_set import WINDOW_SHARDS, Shard

MIXTURE_SLOTS = 4096


class EpochOrder:
    """The window and row at each position of an epoch."""

    def __init__(self, row_counts: Sequence[int], key: np.uint64) -> None:
        """Take `row_counts`, the number of rows of every shard, in the order of the manifest."""
        counts = np.asarray(row_counts, np.int64)
        ranks = fold(fold(key, Purpose.SHARD_ORDER), np.arange(len(counts)))
        permuted = np.argsort(ranks, kind="stable")
        self.windows = [permuted[first : first + WINDOW_SHARDS] for first in range(0, len(permuted), WINDOW_SHARDS)]
        """Indexes of the shards of each window, in the order in which their rows are concatenated."""
        self._sizes = np.array([counts[window].sum() for window in self.windows], np.int64)
        self._starts = np.cumsum(self._sizes) - self._sizes
        self._keys = fold(fold(key, Purpose.ROW_ORDER), np.arange(len(self.windows)))
        self.num_rows = int(counts.sum())

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (index of the window, row within it) of `positions` (n,) int64 of the epoch, each (n,) int64."""
        assert not len(positions) or (positions.min() >= 0 and positions.max() < self.num_rows)
        windows = np.searchsorted(self._starts, positions, side="right") - 1
        rows = permute(positions - self._starts[windows], self._sizes[windows], self._keys[windows])
        return windows, rows


class Mixture:
    """Component of each sample: a seeded table of 4,096 slots, with exact shares in every 4,096 samples."""

    def __init__(self, weights: Sequence[float], key: np.uint64) -> None:
        """Divide the table by `weights`, in the order given by `key`.

        Raises:
            UsageError: a component's weight is too small for one slot.
        """
        exact = np.asarray(weights, np.float64) / np.sum(weights) * MIXTURE_SLOTS
        self.counts = np.floor(exact).astype(np.int64)
        largest_remainders = np.argsort(self.counts - exact, kind="stable")
        self.counts[largest_remainders[: MIXTURE_SLOTS - self.counts.sum()]] += 1
        if not self.counts.all():
            number = int(np.argmin(self.counts))
            raise UsageError(
                f"data.shards[{number}].weight={weights[number]} is less than 1/{MIXTURE_SLOTS} of the samples",
                fix="raise it or remove the component",
                code="weight-too-small",
            )
        ranks = fold(key, np.arange(MIXTURE_SLOTS))
        self.table = np.repeat(np.arange(len(self.counts)), self.counts)[np.argsort(ranks, kind="stable")]
        """(4096,) int64: the component of sample i is in slot i % 4096."""
        self._earlier = np.empty(MIXTURE_SLOTS, np.int64)  # how often the component occurs before this slot
        for component, count in enumerate(self.counts):
            self._earlier[self.table == component] = np.arange(count)

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (component, number of its earlier samples) of `samples` (n,) int64, each (n,) int64."""
        tables, slots = np.divmod(samples, MIXTURE_SLOTS)
        components = self.table[slots]
        return components, tables * self.counts[components] + self._earlier[slots]

    def num_earlier(self, sample: int, component: int) -> int:
        """Return the number of a component's samples before `sample`."""
        tables, slot = divmod(sample, MIXTURE_SLOTS)
        return int(tables * self.counts[component] + np.count_nonzero(self.table[:slot] == component))


class ComponentEpoch:
    """An epoch of one component: the same shards, settings and key give the same rows in the same order."""

    def __init__(
        self, shards: Sequence[Shard], settings: RowSettings, key: np.uint64, counts: np.ndarray | None = None
    ) -> None:
        """Take `counts` of the sentence pairs of all shards, (num_shards, `NUM_COUNTS`), where they are known."""
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
