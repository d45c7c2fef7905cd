"""Histograms of lengths in fixed memory, with percentiles and logarithmic bins."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

EXACT_LENGTHS = 1 << 16
_EXACT_BITS = 16
_STEPS_PER_OCTAVE = 256
_OCTAVES = 48


class Bin(NamedTuple):
    """Number of lengths from `low` to `high`, both inclusive."""

    low: int
    high: int
    num: int


class LengthHistogram:
    """Counts of positive lengths, in 0.6 MB for any number of them.

    Lengths below `EXACT_LENGTHS` have a counter each, so their percentiles are exact; longer ones share classes
    2^(1/256) apart, so a percentile among them is at most 0.3% low. Number, sum, shortest and longest are exact.
    """

    def __init__(self) -> None:
        self.num, self.sum = 0, 0
        self.shortest, self.longest = 0, 0
        self._counts = np.zeros(EXACT_LENGTHS + _OCTAVES * _STEPS_PER_OCTAVE, np.int64)

    def add(self, lengths: np.ndarray) -> None:
        """Count lengths of any shape and integer type, each at least 1."""
        if not lengths.size:
            return
        lengths = lengths.ravel().astype(np.int64)
        shortest, longest = int(lengths.min()), int(lengths.max())
        assert shortest > 0, "the indexes refuse empty documents and sentences"
        self.shortest = min(self.shortest, shortest) if self.num else shortest
        self.longest = max(self.longest, longest)
        self.num += lengths.size
        self.sum += int(lengths.sum())
        is_long = lengths >= EXACT_LENGTHS
        self._counts += np.bincount(lengths[~is_long], minlength=len(self._counts))
        steps = np.floor((np.log2(lengths[is_long]) - _EXACT_BITS) * _STEPS_PER_OCTAVE).astype(np.int64)
        self._counts += np.bincount(EXACT_LENGTHS + steps, minlength=len(self._counts))

    @property
    def mean(self) -> float:
        """Mean length; 0 if nothing was added."""
        return self.sum / self.num if self.num else 0.0

    def percentile(self, percent: float) -> int:
        """Return the smallest length that at least `percent` of all do not exceed; 0 if nothing was added."""
        if percent <= 0 or not self.num:
            return self.shortest
        if percent >= 100:
            return self.longest
        rank = max(1, math.ceil(percent / 100 * self.num))
        length = _length_of_class(int(np.searchsorted(np.cumsum(self._counts), rank)))
        return min(max(length, self.shortest), self.longest)

    def bins(self, bins_per_octave: int = 1) -> list[Bin]:
        """Return counts between powers of 2^(1/bins_per_octave), rounded up to whole lengths, in ascending order."""
        if not self.num:
            return []
        first = math.floor(math.log2(self.shortest)) * bins_per_octave
        powers = range(first, first + (_OCTAVES + _EXACT_BITS) * bins_per_octave)
        edges = sorted({math.ceil(2 ** (power / bins_per_octave)) for power in powers})
        kept = [edge for edge in edges if edge <= self.longest]
        edges = kept + edges[len(kept) : len(kept) + 1]
        totals = np.append(0, np.cumsum(self._counts))
        below = [int(totals[_class_of_length(edge)]) for edge in edges]
        found = [
            Bin(low, high - 1, stop - start)
            for low, high, start, stop in zip(edges, edges[1:], below, below[1:], strict=False)
        ]
        return found[next(number for number, item in enumerate(found) if item.num) :]


def _class_of_length(length: int) -> int:
    """Return the first class whose lengths are all at least `length`."""
    if length <= EXACT_LENGTHS:
        return length
    number = EXACT_LENGTHS + math.floor((math.log2(length) - _EXACT_BITS) * _STEPS_PER_OCTAVE)
    return number if _length_of_class(number) >= length else number + 1


def _length_of_class(number: int) -> int:
    """Return the shortest length that a class counts."""
    if number < EXACT_LENGTHS:
        return number
    return math.ceil(2 ** (_EXACT_BITS + (number - EXACT_LENGTHS) / _STEPS_PER_OCTAVE) - 1e-6)
