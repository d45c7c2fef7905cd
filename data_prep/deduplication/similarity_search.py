"""Similarity search without comparing every pair: locality-sensitive hashing, and clusters of the similar pairs.

A signature is divided into bands of a few rows. Documents that agree in all rows of any band are candidates (Leskovec,
Rajaraman and Ullman, "Mining of Massive Datasets", section 3.4); candidates are compared by their full signatures.
Everything here is a pure function of arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# A dissimilar candidate costs one comparison, a missed pair stays in the corpus: so misses weigh more.
FALSE_NEGATIVE_WEIGHT = 0.98
# Number of documents of a group that the others are compared with; prevents n * n comparisons in a group of n.
MAX_LEADERS = 8
_INTEGRATION_STEPS = 1000


@dataclass(frozen=True)
class Bands:
    """Division of a signature: its first `num_bands * rows` values are used."""

    num_bands: int
    rows: int

    def collision_probability(self, similarity: np.ndarray) -> np.ndarray:
        """Return the probability that two documents of this Jaccard similarity agree in some band."""
        return 1.0 - (1.0 - similarity**self.rows) ** self.num_bands


@functools.lru_cache(maxsize=64)
def choose_bands(threshold: float, num_hashes: int, false_negative_weight: float = FALSE_NEGATIVE_WEIGHT) -> Bands:
    """Choose the bands with the least weighted area of false positives below and false negatives above the threshold.

    The error is the integral over the similarity of the probability to be wrong, as in Zhu et al. 2016, "LSH
    Ensemble", section 5; of equal ones the first in order of rows, then bands.
    """
    below, width_below = _midpoints(0.0, threshold)
    above, width_above = _midpoints(threshold, 1.0)
    best, least_error = Bands(1, num_hashes), float("inf")
    for rows in range(1, num_hashes + 1):
        for num_bands in range(1, num_hashes // rows + 1):
            bands = Bands(num_bands, rows)
            false_positive = bands.collision_probability(below).sum() * width_below
            false_negative = (1.0 - bands.collision_probability(above)).sum() * width_above
            error = (1.0 - false_negative_weight) * false_positive + false_negative_weight * false_negative
            # Beyond 12 digits processors disagree, and all hosts of a cluster must choose the same.
            error = round(float(error), 12)
            if error < least_error:
                best, least_error = bands, error
    return best


def band_keys(signatures: np.ndarray, bands: Bands) -> np.ndarray:
    """Return one key for the rows of each band of signatures (D, num_hashes), (D, num_bands) uint64.

    The index of the band is part of the key, so that one list holds the keys of all bands.
    """
    used = signatures[:, : bands.num_bands * bands.rows].astype(np.uint64)
    by_band = used.reshape(len(signatures), bands.num_bands, bands.rows)
    keys = np.broadcast_to(mix(np.arange(bands.num_bands, dtype=np.uint64)), by_band.shape[:2])
    for row in range(bands.rows):
        keys = mix(keys ^ by_band[:, :, row])
    return keys


def similar_pairs(keys: np.ndarray, indices: np.ndarray, are_similar: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return the similar pairs of documents with equal keys, (P, 2) int64, sorted, the earlier document first.

    In a group of equal keys all are compared with the earliest; those not similar to it with the earliest among them,
    and so on `MAX_LEADERS` times. So the cost of a group is proportional to its size, and its pairs form a star.

    Args:
        keys: (E,) uint64; all entries of the corpus with these keys.
        indices: (E,) int64 of the documents, below 2**32.
        are_similar: maps pairs (n, 2) to (n,) bool.
    """
    order = np.lexsort((indices, keys))
    keys, indices = keys[order], indices[order]
    found: list[np.ndarray] = []
    for _ in range(MAX_LEADERS):
        begins = np.diff(keys, prepend=keys[:1] ^ np.uint64(1)) != 0
        alone = begins & np.append(begins[1:], True)
        keys, indices, begins = keys[~alone], indices[~alone], begins[~alone]
        if not len(keys):
            break
        leaders = indices[np.maximum.accumulate(np.where(begins, np.arange(len(keys)), 0))]
        # A pair that occurs in several bands is compared once.
        packed, numbers = np.unique(leaders[~begins] << 32 | indices[~begins], return_inverse=True)
        pairs = _unpacked(packed)
        similar = are_similar(pairs)
        found.append(packed[similar])
        left = ~begins
        left[left] = ~similar[numbers]
        keys, indices = keys[left], indices[left]
    return _unpacked(np.unique(np.concatenate([*found, np.empty(0, np.int64)])))


def clusters(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the connected components of pairs (P, 2): members (n,) int64, sorted, and the least of each one's, (n,).

    Every round hooks the larger of two roots that a pair joins under the smallest such, then lets all members point to
    their roots; roots only decrease, so the order of the pairs does not matter.
    """
    members, numbers = np.unique(pairs, return_inverse=True)
    left, right = numbers.reshape(-1, 2).T
    roots = np.arange(len(members))
    while True:
        low, high = np.minimum(roots[left], roots[right]), np.maximum(roots[left], roots[right])
        apart = low != high
        if not apart.any():
            return members, members[roots]
        left, right, low, high = left[apart], right[apart], low[apart], high[apart]
        np.minimum.at(roots, high, low)
        while not np.array_equal(roots, higher := roots[roots]):
            roots = higher


def _midpoints(start: float, stop: float) -> tuple[np.ndarray, float]:
    width = (stop - start) / _INTEGRATION_STEPS
    return start + (np.arange(_INTEGRATION_STEPS) + 0.5) * width, width


def _unpacked(packed: np.ndarray) -> np.ndarray:
    return np.column_stack([packed >> 32, packed & 0xFFFFFFFF])


def mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the finishing step of splitmix64 (Steele et al. 2014) to every value of a uint64 array."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
