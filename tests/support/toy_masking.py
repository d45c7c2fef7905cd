"""Maskings as a user may bring them, `tests.support.toy_masking:NAME`."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from trainer.data.masking import Masking, word_starts
from trainer.data.randomness import fold, uniform

LETTERS = 4


def four_letters(
    rows: np.ndarray, keys: np.ndarray, rates: np.ndarray, settings: Masking
) -> tuple[np.ndarray, np.ndarray]:
    """Mask each word of four letters with twice the probability `rates`, as long as there is space, and no other."""
    text = settings.special_tokens.are_ordinary(rows)
    # Words are numbered from 1 in each row; 0 is what stands before the first.
    words = np.cumsum(word_starts(rows, text, settings.kinds), axis=1)
    own = words + np.arange(len(rows))[:, None] * (rows.shape[1] + 1)  # numbers of their own over all rows
    letters = np.bincount(own[text], weights=_letters(settings.pieces)[rows[text]], minlength=own.max() + 1)
    draws = uniform(fold(keys[:, None], words))  # one for each word
    chosen = text & (letters[own] == LETTERS) & (draws < 2 * rates[:, None])
    chosen &= np.cumsum(chosen, axis=1) <= settings.max_masked(rows.shape[1])
    return np.where(chosen, settings.special_tokens.mask, rows), np.where(chosen, rows, -100)


@lru_cache(maxsize=1)
def _letters(pieces: tuple[str, ...]) -> np.ndarray:
    """Return the number of letters of each token of the vocabulary."""
    return np.array([len(piece.replace("\u2581", "")) for piece in pieces])
