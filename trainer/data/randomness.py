"""Stateless randomness: 64-bit hashes of the purpose and index of a draw, vectorized over arrays.

A draw is a pure function of its key and a counter (SplitMix64: Steele, Lea and Flood 2014), so it depends neither on
ranks and workers nor on earlier draws, and a micro-batch costs a few array operations instead of a generator per
row.
"""

from __future__ import annotations

from enum import IntEnum
from typing import overload

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = np.uint64(0x94D049BB133111EB)
_PERMUTATION_ROUNDS = 4


class Purpose(IntEnum):
    """Purpose of a draw; equal counters under different purposes are independent."""

    TRAINING = 1
    EVALUATION = 2
    MIXTURE = 3
    EPOCH = 4
    SHARD_ORDER = 5
    ROW_ORDER = 6
    SENTENCE_PAIRS = 7
    MASKING = 8
    HIDDEN_WORDS = 9
    MASKING_RATE = 10


def root_key(seed: int | np.uint64, *words: int) -> np.uint64:
    """Return the key of a seed (or another key) and a sequence of words (purpose, epoch, ...)."""
    key = np.uint64(int(seed) % 2**64)
    for word in words:
        key = fold(key, word)
    return key


@overload
def fold(keys: np.uint64, words: int) -> np.uint64: ...
@overload
def fold(keys: np.uint64, words: np.ndarray) -> np.ndarray: ...
@overload
def fold(keys: np.ndarray, words: np.ndarray | int) -> np.ndarray: ...
def fold(keys: np.ndarray | np.uint64, words: np.ndarray | int) -> np.ndarray | np.uint64:
    """Hash `words` (not negative) under `keys`; both broadcast. The results are uniform and can be used as keys.

    Returns:
        uint64 of the broadcast shape.
    """
    with np.errstate(over="ignore"):  # the arithmetic is modulo 2^64; numpy would warn for scalars
        state = (np.asarray(words).astype(np.uint64) + np.uint64(1)) * _GAMMA + keys
        state ^= state >> np.uint64(30)
        state *= _FIRST_FACTOR
        state ^= state >> np.uint64(27)
        state *= _SECOND_FACTOR
        state ^= state >> np.uint64(31)
        return state


def uniform(hashes: np.ndarray) -> np.ndarray:
    """Return float64 in [0, 1) of the same shape, with 53 random bits."""
    return (hashes >> np.uint64(11)) * 2.0**-53


def high_bits(hashes: np.ndarray) -> np.ndarray:
    """Return the upper 32 bits as int64, so that one hash serves two draws."""
    return (hashes >> np.uint64(32)).astype(np.int64)


def low_bits(hashes: np.ndarray) -> np.ndarray:
    """Return the lower 32 bits as int64."""
    return (hashes & np.uint64(0xFFFFFFFF)).astype(np.int64)


def below(bits: np.ndarray, bounds: np.ndarray | int) -> np.ndarray:
    """Map 32 random bits to the integers 0 to `bounds` - 1, int64; the bias is under bounds / 2^32."""
    return (bits * bounds) >> 32


def permute(positions: np.ndarray, sizes: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Map `positions` by a pseudorandom bijection of range(size), elementwise, each under its own size and key.

    A Feistel network over pairs of digits to the base ceil(sqrt(size)); results outside the range pass through it again
    ("cycle walking", Black and Rogaway 2002), so that memory does not grow with the range.

    Args:
        positions, sizes: (N,) int64. keys: (N,) uint64.

    Returns:
        (N,) int64.
    """
    bases = np.ceil(np.sqrt(sizes)).astype(np.int64)
    result = positions.copy()
    walking = np.arange(len(positions))
    while len(walking):
        base, key = bases[walking], keys[walking]
        left, right = np.divmod(result[walking], base)
        for number in range(_PERMUTATION_ROUNDS):
            mixed = below(high_bits(fold(key, right * _PERMUTATION_ROUNDS + number)), base)
            left, right = right, (left + mixed) % base
        moved = left * base + right
        result[walking] = moved
        walking = walking[moved >= sizes[walking]]
    return result
