"""Masking for the masked language model: the tokens to predict, and their replacements in the input.

Devlin et al. 2018, section 3.1: of the tokens to predict, 80% become [MASK], 10% a random token, 10% stay. The units
are single tokens, whole words, or spans (Joshi et al. 2019, "SpanBERT"). A row predicts k = floor(p n + u) of its n
tokens, u in [0, 1) from the row's key, so the expectation is exactly p and k never exceeds the fixed capacity. A pure
function of the rows and their keys, for a whole micro-batch at once. A masking of the user's own takes its place
(`trainer/data/custom_masking.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from data_prep.tokenizer.special_tokens import OWN_SPECIAL_TOKENS, SpecialTokens
from trainer.data.batch import IGNORED
from trainer.data.mask_units import choose_parts, choose_tokens, choose_whole, split_spans
from trainer.data.randomness import below, fold, high_bits, low_bits, uniform
from trainer.data.words import word_starts

# Counters under a row's key: 0 to L - 1 choose positions, these draw the rest.
_TREATMENT = 1 << 32
_NUM_MASKED = 1 << 33
_SPANS = 1 << 34

MaskingUnit = Literal["token", "word", "span"]


@dataclass(frozen=True)
class Masking:
    """Settings of masking; `vocab_size` is that of the tokenizer, not the padded one of the model.

    Attributes:
        max_mlm_probability: the largest share of the tokens to predict in the run; fixes the capacity of a batch.
        unit: unit that is masked together.
        kinds: (vocab_size,) the `piece_kinds` of the vocabulary, for words and spans.
        mean_span_words: mean of the geometric distribution of span lengths, in words.
        special_tokens: never predicted, and no replacement except [MASK].
        custom: name of the user's own function that masks instead, `module:function`.
        pieces: (vocab_size,) the text of each token, for such a function; U+2581 stands for the space before a word.
    """

    max_mlm_probability: float
    mask_share: float
    random_share: float
    vocab_size: int
    unit: MaskingUnit = "token"
    kinds: np.ndarray | None = None
    mean_span_words: float = 3.0
    special_tokens: SpecialTokens = OWN_SPECIAL_TOKENS
    custom: str | None = None
    pieces: tuple[str, ...] | None = None

    @cached_property
    def ordinary_ids(self) -> np.ndarray:
        """Ids that may replace another one, (n,) int64."""
        return self.special_tokens.ordinary(self.vocab_size)

    def max_masked(self, sequence_length: int) -> int:
        """Return the largest number of predicted tokens in a row."""
        return math.ceil(self.max_mlm_probability * sequence_length)


@dataclass(frozen=True)
class MaskedRows:
    """Masked rows and their labels."""

    input_ids: np.ndarray
    """(R * L,) int64."""
    masked_positions: np.ndarray
    """(R * max_masked,) int64: ascending indices into `input_ids`, then 0 where unused."""
    labels: np.ndarray
    """(R * max_masked,) int64: the original ids, then -100 where unused."""

    @classmethod
    def of(cls, input_ids: np.ndarray, positions: np.ndarray, originals: np.ndarray, capacity: int) -> MaskedRows:
        """Return masked rows that predict the `originals` at ascending `positions`, at most `capacity` of them."""
        masked_positions = np.zeros(capacity, np.int64)
        labels = np.full(capacity, IGNORED)
        masked_positions[: len(positions)] = positions
        labels[: len(positions)] = originals
        return cls(input_ids, masked_positions, labels)


def mask_rows(
    input_ids: np.ndarray, keys: np.ndarray, masking: Masking, probability: float | None = None
) -> MaskedRows:
    """Mask rows of L positions.

    Args:
        input_ids: (R, L) int64; special tokens are never chosen.
        keys: (R,) uint64, of (seed, epoch, sample).
        probability: share of the tokens to predict, at most `masking.max_mlm_probability`, its default.
    """
    num_rows, sequence_length = input_ids.shape
    probability = masking.max_mlm_probability if probability is None else probability
    assert probability <= masking.max_mlm_probability, "the capacity is that of the largest share"
    chosen, unit_starts = _choose(input_ids, keys, masking, probability)
    positions = np.flatnonzero(chosen)
    originals = input_ids.reshape(-1)[positions]
    rows, columns = np.divmod(positions, sequence_length)
    draws = fold(keys[rows], columns + _TREATMENT)
    # All tokens of a span get the same treatment, so that none of them reveals the others.
    share_draws = draws if unit_starts is None else fold(keys[rows], unit_starts.reshape(-1)[positions] + _TREATMENT)
    share = high_bits(share_draws)
    random_ids = masking.ordinary_ids[below(low_bits(draws), len(masking.ordinary_ids))]
    seen = np.where(share < (masking.mask_share + masking.random_share) * 2**32, random_ids, originals)
    seen = np.where(share < masking.mask_share * 2**32, masking.special_tokens.mask, seen)

    masked_ids = input_ids.reshape(-1).copy()
    masked_ids[positions] = seen
    return MaskedRows.of(masked_ids, positions, originals, num_rows * masking.max_masked(sequence_length))


def _choose(
    input_ids: np.ndarray, keys: np.ndarray, masking: Masking, probability: float
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return which positions are predicted, (R, L) bool, and with spans the start of each one's span, (R, L)."""
    maskable = masking.special_tokens.are_ordinary(input_ids)
    budgets = np.floor(probability * maskable.sum(1) + uniform(fold(keys, _NUM_MASKED))).astype(np.int64)
    hashes = fold(keys[:, None], np.arange(input_ids.shape[1]))
    if masking.unit == "token":
        return choose_tokens(maskable, hashes, budgets), None
    assert masking.kinds is not None, "words and spans need the token kinds of the vocabulary"
    starts = word_starts(input_ids, maskable, masking.kinds)
    if masking.unit == "word":
        return choose_whole(maskable, starts, hashes, budgets), None
    cuts = uniform(fold(keys[:, None], np.arange(input_ids.shape[1]) + _SPANS))
    starts = split_spans(maskable, starts, cuts, masking.mean_span_words)
    return choose_parts(maskable, starts, hashes, budgets)
