"""Masking for the masked language model: which tokens are predicted, and what the model sees in their place.

Devlin et al. 2018, section 3.1: of the tokens to predict, 80% become [MASK], 10% a random token, 10% stay. A row
predicts exactly k = floor(p n + u) of its n tokens, u in [0, 1) from the row's key, so the expectation is exactly p
and k never exceeds the fixed capacity. A pure function of the rows and their keys, for a whole micro-batch at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from data_prep.tokenizer import MASK_TOKEN_ID, SPECIAL_TOKENS
from trainer.data.batch import IGNORED
from trainer.data.randomness import below, fold, high_bits, low_bits, uniform

NUM_SPECIAL_TOKENS = len(SPECIAL_TOKENS)

# Counters under a row's key: 0 to L - 1 choose places, these draw the rest.
_TREATMENT = 1 << 32
_NUM_MASKED = 1 << 33


@dataclass(frozen=True)
class Masking:
    """How tokens are masked; `vocab_size` is the tokenizer's, not the padded one of the model."""

    mlm_probability: float
    mask_share: float
    random_share: float
    vocab_size: int

    def max_masked(self, sequence_length: int) -> int:
        """The most tokens that a row can predict."""
        return math.ceil(self.mlm_probability * sequence_length)


@dataclass(frozen=True)
class MaskedRows:
    """Rows as the model sees them, and what it is to predict."""

    input_ids: np.ndarray
    """(R * L,) int64."""
    masked_positions: np.ndarray
    """(R * max_masked,) int64: ascending indices into `input_ids`, then 0 where unused."""
    labels: np.ndarray
    """(R * max_masked,) int64: the original ids, then -100 where unused."""


def mask_rows(input_ids: np.ndarray, keys: np.ndarray, masking: Masking) -> MaskedRows:
    """Mask rows of L places.

    Args:
        input_ids: (R, L) int64; ids below `NUM_SPECIAL_TOKENS` are never chosen.
        keys: (R,) uint64, of (seed, epoch, sample).
    """
    num_rows, sequence_length = input_ids.shape
    positions = np.flatnonzero(_choose(input_ids >= NUM_SPECIAL_TOKENS, keys, masking.mlm_probability))
    originals = input_ids.reshape(-1)[positions]
    rows, places = np.divmod(positions, sequence_length)
    draws = fold(keys[rows], places + _TREATMENT)
    share = high_bits(draws)
    random_ids = NUM_SPECIAL_TOKENS + below(low_bits(draws), masking.vocab_size - NUM_SPECIAL_TOKENS)
    seen = np.where(share < (masking.mask_share + masking.random_share) * 2**32, random_ids, originals)
    seen = np.where(share < masking.mask_share * 2**32, MASK_TOKEN_ID, seen)

    masked_ids = input_ids.reshape(-1).copy()
    masked_ids[positions] = seen
    capacity = num_rows * masking.max_masked(sequence_length)
    masked_positions = np.zeros(capacity, np.int64)
    labels = np.full(capacity, IGNORED)
    masked_positions[: len(positions)] = positions
    labels[: len(positions)] = originals
    return MaskedRows(masked_ids, masked_positions, labels)


def _choose(maskable: np.ndarray, keys: np.ndarray, probability: float) -> np.ndarray:
    """Exactly k of each row's maskable places: those with the smallest hashes; (R, L) bool."""
    num_rows, sequence_length = maskable.shape
    num_masked = np.floor(probability * maskable.sum(1) + uniform(fold(keys, _NUM_MASKED))).astype(np.int64)
    hashes = fold(keys[:, None], np.arange(sequence_length))
    # The place in the lowest bits: hashes of a row are never equal, so k is exact.
    place_bits = np.uint64((sequence_length - 1).bit_length())
    hashes >>= place_bits
    hashes <<= place_bits
    hashes |= np.arange(sequence_length, dtype=np.uint64)
    hashes[~maskable] = np.iinfo(np.uint64).max
    thresholds = np.sort(hashes, axis=1)[np.arange(num_rows), np.maximum(num_masked - 1, 0)]
    return maskable & (hashes <= thresholds[:, None]) & (num_masked > 0)[:, None]
