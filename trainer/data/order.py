"""The order of the rows of an epoch, and of the components of a mixture.

Shards are permuted, and rows are permuted within windows of 16 shards, so that a reader needs few shards at a time and
each only once. Both are pure functions of a key and the shards' row counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data_prep.base.errors import UsageError
from trainer.data.randomness import Purpose, fold, permute

WINDOW_SHARDS = 16
MIXTURE_PLACES = 4096


class EpochOrder:
    """Which row of which window stands at each place of an epoch."""

    def __init__(self, row_counts: Sequence[int], key: np.uint64) -> None:
        """`row_counts` are the rows of every shard, in the manifests' order."""
        counts = np.asarray(row_counts, np.int64)
        ranks = fold(fold(key, Purpose.SHARD_ORDER), np.arange(len(counts)))
        permuted = np.argsort(ranks, kind="stable")
        self.windows = [permuted[first : first + WINDOW_SHARDS] for first in range(0, len(permuted), WINDOW_SHARDS)]
        """The numbers of the shards of each window, in the order in which their rows are laid end to end."""
        self._sizes = np.array([counts[window].sum() for window in self.windows], np.int64)
        self._starts = np.cumsum(self._sizes) - self._sizes
        self._keys = fold(fold(key, Purpose.ROW_ORDER), np.arange(len(self.windows)))
        self.num_rows = int(counts.sum())

    def locate(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For `places` (n,) int64 of the epoch: (number of the window, row within it), each (n,) int64."""
        assert not len(places) or (places.min() >= 0 and places.max() < self.num_rows)
        windows = np.searchsorted(self._starts, places, side="right") - 1
        rows = permute(places - self._starts[windows], self._sizes[windows], self._keys[windows])
        return windows, rows


class Mixture:
    """Which component each sample comes from: a seeded table of 4,096 places, exact in every 4,096 samples."""

    def __init__(self, weights: Sequence[float], key: np.uint64) -> None:
        """Share the table by `weights`, in an order that `key` names.

        Raises:
            UsageError: a component's weight is too small for one place.
        """
        exact = np.asarray(weights, np.float64) / np.sum(weights) * MIXTURE_PLACES
        self.counts = np.floor(exact).astype(np.int64)
        largest_remainders = np.argsort(self.counts - exact, kind="stable")
        self.counts[largest_remainders[: MIXTURE_PLACES - self.counts.sum()]] += 1
        if not self.counts.all():
            number = int(np.argmin(self.counts))
            raise UsageError(
                f"data.shards[{number}].weight={weights[number]} is less than 1/{MIXTURE_PLACES} of the samples",
                fix="raise it or remove the component",
                code="weight-too-small",
            )
        ranks = fold(key, np.arange(MIXTURE_PLACES))
        self.table = np.repeat(np.arange(len(self.counts)), self.counts)[np.argsort(ranks, kind="stable")]
        """(4096,) int64: the component of sample i stands at place i % 4096."""
        self._earlier = np.empty(MIXTURE_PLACES, np.int64)  # how often the component stands before this place
        for component, count in enumerate(self.counts):
            self._earlier[self.table == component] = np.arange(count)

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For `samples` (n,) int64: (component, how many of the component's samples came before), each (n,) int64."""
        tables, places = np.divmod(samples, MIXTURE_PLACES)
        components = self.table[places]
        return components, tables * self.counts[components] + self._earlier[places]
