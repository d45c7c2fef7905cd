"""Order of the rows of an epoch, and of the components of a mixture.

Shards are permuted, and rows are permuted within windows of 16 shards, so that a reader needs few shards at a time,
each only once. Both are pure functions of a key and the row counts of the shards.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data_prep.base.errors import UsageError
from trainer.data.randomness import Purpose, fold, permute

WINDOW_SHARDS = 16
MIXTURE_SLOTS = 4096


class EpochOrder:
    """The window and row at each position of an epoch."""

    def __init__(self, row_counts: Sequence[int], key: np.uint64) -> None:
        """`row_counts` has the number of rows of every shard, in the order of the manifest."""
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
