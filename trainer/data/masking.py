"""Masking for the masked language model: the tokens to predict, and their replacements in the input.

Devlin et al. 2018, section 3.1: of the tokens to predict, 80% become [MASK], 10% a random token, 10% stay. The units
are single tokens, whole words, or spans (Joshi et al. 2019, "SpanBERT"). A row predicts k = floor(p n + u) of its n
tokens, u in [0, 1) from the row's key, so the expectation is exactly p and k never exceeds the fixed capacity. Where p
is drawn for each row, u is 1/2 (`trainer/config/masking_law.py`). Masking is a pure function of the rows, their keys
and rates, for a whole micro-batch at once. A masking of the user's own can replace it
(`trainer/data/custom_masking.py`).

Words follow from token ids alone. A word is the text between two spaces: its first token begins with the metaspace
(U+2581), the others do not. In scripts without spaces that would be an entire clause, so there every token is a word. A
character that the vocabulary lacks is several byte tokens, which stay together. Tokens of a foreign vocabulary have the
same form (`data_prep.tokenizer.foreign_files`); they can contain other white space, which counts like the metaspace.
Units (words, spans) are runs of positions, taken in the order of their hashes until the row's budget is spent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Literal

import numpy as np
import regex

from data_prep.text.cleaning import METASPACE
from data_prep.tokenizer.special_tokens import OWN_SPECIAL_TOKENS, SpecialTokens
from trainer.config.masking_law import Law, capacity, num_predicted
from trainer.data.batch import IGNORED
from trainer.data.randomness import below, fold, high_bits, low_bits, uniform

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
        unit: what is masked together.
        kinds: (vocab_size,) the `piece_kinds` of the vocabulary, for words and spans.
        mean_span_words: mean of the geometric distribution of span lengths, in words.
        special_tokens: never predicted, and no replacement except [MASK].
        custom: name of the user's own function that masks instead, `module:function`.
        pieces: (vocab_size,) the text of each token, for such a function; U+2581 stands for the space before a word.
        law: that draws a rate for every row; None where all rows of a step have one.
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
    law: Law | None = None

    @cached_property
    def ordinary_ids(self) -> np.ndarray:
        """Ids that may replace another one, (n,) int64."""
        return self.special_tokens.ordinary(self.vocab_size)

    def max_masked(self, sequence_length: int) -> int:
        """Return the largest number of predicted tokens in a row."""
        return math.ceil(self.max_mlm_probability * sequence_length)

    def capacity(self, num_rows: int, sequence_length: int) -> int:
        """Return the room for predictions in so many consecutive rows."""
        if self.law is not None and self.custom is None:
            return capacity(self.law, num_rows, sequence_length)
        return num_rows * self.max_masked(sequence_length)


@dataclass(frozen=True)
class MaskedRows:
    """Masked rows and their labels."""

    input_ids: np.ndarray
    """(R * L,) int64."""
    masked_positions: np.ndarray
    """(capacity,) int64: ascending indices into `input_ids`, then 0 where unused."""
    labels: np.ndarray
    """(capacity,) int64: the original ids, then -100 where unused."""

    @classmethod
    def of(cls, input_ids: np.ndarray, positions: np.ndarray, originals: np.ndarray, capacity: int) -> MaskedRows:
        """Return masked rows that predict the `originals` at ascending `positions`, at most `capacity` of them."""
        masked_positions = np.zeros(capacity, np.int64)
        labels = np.full(capacity, IGNORED)
        masked_positions[: len(positions)] = positions
        labels[: len(positions)] = originals
        return cls(input_ids, masked_positions, labels)


def mask_rows(
    input_ids: np.ndarray, keys: np.ndarray, masking: Masking, rates: np.ndarray | float | None = None
) -> MaskedRows:
    """Mask rows of L positions.

    Args:
        input_ids: (R, L) int64; special tokens are never chosen.
        keys: (R,) uint64, of (seed, epoch, sample).
        rates: share of the tokens to predict, (R,) or one for all rows, at most `masking.max_mlm_probability`, the
            default. Rows of a law that draws rates are consecutive samples, with the rates of their draws and with
            [CLS] and [SEP].
    """
    num_rows, sequence_length = input_ids.shape
    rates = np.broadcast_to(masking.max_mlm_probability if rates is None else rates, num_rows)
    assert not num_rows or rates.max() <= masking.max_mlm_probability + 1e-9, (
        "the capacity is that of the largest share"
    )
    chosen, unit_starts = _choose(input_ids, keys, masking, rates)
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
    return MaskedRows.of(masked_ids, positions, originals, masking.capacity(num_rows, sequence_length))


def _choose(
    input_ids: np.ndarray, keys: np.ndarray, masking: Masking, rates: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return which positions are predicted, (R, L) bool, and with spans the start of each one's span, (R, L)."""
    maskable = masking.special_tokens.are_ordinary(input_ids)
    if masking.law is None:
        budgets = np.floor(rates * maskable.sum(1) + uniform(fold(keys, _NUM_MASKED))).astype(np.int64)
    else:
        budgets = num_predicted(rates, maskable.sum(1))
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


MAX_SPAN_WORDS = 10
"""Longer spans are cut, as in Joshi et al. 2019."""


@dataclass(frozen=True)
class _Units:
    """U units of R rows, row by row and within a row in the order of their hashes."""

    rows: np.ndarray
    """(U,) row of each unit."""
    sizes: np.ndarray
    """(U,) number of tokens of the unit."""
    numbers: np.ndarray
    """(U,) index of the unit in the order of positions."""
    of_position: np.ndarray
    """(maskable positions,) index of the unit of each maskable position."""
    firsts: np.ndarray
    """(U,) flat position of the first token, by that index."""


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


_WITHOUT_SPACES = regex.compile(
    r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Bopomofo}\p{Yi}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}\p{Javanese}"
    r"\u3000-\u303f\uff00-\uffef]"
)
_BYTES = regex.compile(r"<0x([0-9A-F]{2})>(?:<0x[0-9A-F]{2}>)*")
_FIRST_LEAD_OF_THREE_BYTES = 0xE0  # of characters from U+0800 on: hardly ever one of a script with spaces


class PieceKind(IntEnum):
    """Effect of a token on word boundaries."""

    JOINS = 0
    """Continues the previous word, unless that is `ALONE`."""
    OPENS = 1
    """Begins a word: it begins with the metaspace."""
    ALONE = 2
    """A single word: a token of a script without spaces, or the first byte of such a character."""
    CONTINUES = 3
    """A later byte of a character: never separated from the byte before it."""
    SPACE = 4
    """The metaspace alone: begins a word that the next token continues."""


def piece_kinds(pieces: Sequence[str]) -> np.ndarray:
    """Return the `PieceKind` of every id of a vocabulary, (vocab_size,) int8; those of special tokens are not used."""
    return np.array([_kind(piece) for piece in pieces], np.int8)


def word_starts(input_ids: np.ndarray, maskable: np.ndarray, kinds: np.ndarray) -> np.ndarray:
    """Return whether a word begins at each position, (R, L) bool; False at positions that cannot be masked.

    Args:
        input_ids: (R, L) int64.
        maskable: (R, L) bool, False at special tokens: no word reaches across them.
        kinds: (vocab_size,) as `piece_kinds` returns them.
    """
    here = kinds[input_ids]
    positions = np.arange(input_ids.shape[1])
    # A byte that continues a character has the kind of its first byte.
    leads = np.maximum.accumulate(np.where(here == PieceKind.CONTINUES, 0, positions), axis=1)
    before = np.roll(np.take_along_axis(here, leads, axis=1), 1, axis=1)
    follows = np.roll(maskable, 1, axis=1)
    follows[:, 0] = False
    opens = (here == PieceKind.OPENS) | (here == PieceKind.SPACE)
    opens |= (here == PieceKind.ALONE) & (before != PieceKind.SPACE)
    opens |= (here == PieceKind.JOINS) & (before == PieceKind.ALONE)
    begins: np.ndarray = maskable & (opens | ~follows)
    return begins


def _kind(piece: str) -> PieceKind:
    byte = _BYTES.fullmatch(piece)
    if byte:
        value = int(byte[1], 16)
        if 0x80 <= value < 0xC0:
            return PieceKind.CONTINUES
        return PieceKind.ALONE if value >= _FIRST_LEAD_OF_THREE_BYTES else PieceKind.JOINS
    if all(character == METASPACE or character.isspace() for character in piece):
        return PieceKind.SPACE
    if _WITHOUT_SPACES.search(piece):
        return PieceKind.ALONE
    return PieceKind.OPENS if piece[0] == METASPACE or piece[0].isspace() else PieceKind.JOINS
