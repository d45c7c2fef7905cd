"""Choice of the masked units (tokens, whole words, or spans) within a budget, for all rows of a micro-batch at once.

Units (words, spans) are runs of positions, taken in the order of their hashes until the row's budget is spent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MAX_SPAN_WORDS = 10
"""Longer spans are cut, as in Joshi et al. 2019."""


@dataclass(frozen=True)
class _Units:
    """U units of R rows, row by row and within a row in the order of their hashes."""

    rows: np.ndarray
    """(U,) row of each unit."""
    sizes: np.ndarray
    """(U,) number of its tokens."""
    numbers: np.ndarray
    """(U,) its index in the order of positions."""
    of_position: np.ndarray
    """(maskable positions,) index of the unit of each maskable position."""
    firsts: np.ndarray
    """(U,) by index: flat position of the first token."""


def choose_tokens(maskable: np.ndarray, hashes: np.ndarray, budgets: np.ndarray) -> np.ndarray:
    """Choose the `budgets` (R,) maskable positions (R, L) with the smallest hashes of each row; (R, L) bool."""
    num_rows, sequence_length = maskable.shape
    # The lowest bits hold the position: hashes of a row are never equal, so the number is exact.
    position_bits = np.uint64((sequence_length - 1).bit_length())
    hashes = hashes >> position_bits << position_bits
    hashes |= np.arange(sequence_length, dtype=np.uint64)
    hashes[~maskable] = np.iinfo(np.uint64).max
    thresholds = np.sort(hashes, axis=1)[np.arange(num_rows), np.maximum(budgets - 1, 0)]
    chosen: np.ndarray = maskable & (hashes <= thresholds[:, None]) & (budgets > 0)[:, None]
    return chosen


def choose_whole(maskable: np.ndarray, starts: np.ndarray, hashes: np.ndarray, budgets: np.ndarray) -> np.ndarray:
    """Choose whole units in the order of their hashes, if they still fit into the budget of their row; (R, L) bool.

    A unit is never taken in part, so a row misses its budget if no remaining unit is small enough.
    """
    units = _units(maskable, starts, hashes)
    left = budgets.copy()
    taken = np.zeros(len(units.sizes), bool)
    waiting = np.flatnonzero(units.sizes <= left[units.rows])
    while len(waiting):
        rows, sizes = units.rows[waiting], units.sizes[waiting]
        used = _cumulated(sizes, rows)
        fits = used <= left[rows]
        # Take all units before the first that does not fit; skip that one and start the next round after it.
        misses = np.flatnonzero(~fits)
        first_miss = np.full(len(left), len(waiting))
        np.minimum.at(first_miss, rows[misses], misses)
        here = np.arange(len(waiting)) < first_miss[rows]
        taken[waiting[here]] = True
        left -= np.bincount(rows[here], weights=sizes[here], minlength=len(left)).astype(np.int64)
        later = ~here & (sizes <= left[rows])
        waiting = waiting[later]
    by_number = np.zeros(len(units.sizes), bool)
    by_number[units.numbers] = taken
    chosen = np.zeros(maskable.shape, bool)
    chosen[maskable] = by_number[units.of_position]
    return chosen


def choose_parts(
    maskable: np.ndarray, starts: np.ndarray, hashes: np.ndarray, budgets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Choose units in the order of their hashes until the budget is spent exactly; the last is cut at its end.

    Returns:
        The chosen positions, (R, L) bool; the position in the row at which the unit of each begins, (R, L) int64.
    """
    units = _units(maskable, starts, hashes)
    used = _cumulated(units.sizes, units.rows)
    allowed = np.clip(budgets[units.rows] - (used - units.sizes), 0, units.sizes)
    by_number = np.zeros(len(units.sizes), np.int64)
    by_number[units.numbers] = allowed
    first_of_position = units.firsts[units.of_position]
    chosen = np.zeros(maskable.shape, bool)
    chosen[maskable] = np.flatnonzero(maskable) - first_of_position < by_number[units.of_position]
    unit_starts = np.zeros(maskable.shape, np.int64)
    unit_starts[maskable] = first_of_position % maskable.shape[1]
    return chosen, unit_starts


def split_spans(maskable: np.ndarray, starts: np.ndarray, cuts: np.ndarray, mean_words: float) -> np.ndarray:
    """Return where spans begin, (R, L) bool, if every word opens a new one with probability 1 / `mean_words`.

    So lengths are geometric, in words; the first word after a special token opens one, and none has more than
    `MAX_SPAN_WORDS`.

    Args:
        starts: (R, L) bool, where words begin.
        cuts: (R, L) float64 in [0, 1), one draw per position.
    """
    follows = np.roll(maskable, 1, axis=1)
    follows[:, 0] = False
    begins: np.ndarray = starts & (~follows | (cuts < 1.0 / mean_words))
    words = np.cumsum(starts.reshape(-1))
    since = words - np.maximum.accumulate(np.where(begins.reshape(-1), words, 0))
    begins |= starts & (since.reshape(starts.shape) % MAX_SPAN_WORDS == 0)
    return begins


def _units(maskable: np.ndarray, starts: np.ndarray, hashes: np.ndarray) -> _Units:
    """Return every run of maskable positions between starts as a unit, with the hash of its first position."""
    of_position = np.cumsum(starts[maskable]) - 1
    firsts = np.flatnonzero(starts)
    sizes = np.bincount(of_position, minlength=len(firsts))
    rows = firsts // maskable.shape[1]
    order = np.lexsort((hashes.reshape(-1)[firsts], rows))
    return _Units(rows[order], sizes[order], order, of_position, firsts)


def _cumulated(sizes: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return cumulative sums of sizes per row; rows ascend."""
    sums: np.ndarray = np.cumsum(sizes)
    opens = np.flatnonzero(np.diff(rows, prepend=-1))
    sums -= np.repeat(sums[opens] - sizes[opens], np.diff(opens, append=len(rows)))
    return sums
