"""The masking that the settings of a run ask for, of the rows of a batch or of one text of the user's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, Protocol

import numpy as np

from data_prep.base.errors import UsageError
from data_prep.tokenizer.special_tokens import SpecialTokens
from data_prep.tokenizer.tokenizer import Tokenizer
from trainer.config.data_settings import DataSettings
from trainer.data.batch import IGNORED
from trainer.data.custom_masking import CustomMasking
from trainer.data.masking import MaskedRows, Masking, mask_rows, piece_kinds
from trainer.data.randomness import Purpose, fold, root_key, uniform

Treatment = Literal["masked", "random", "unchanged"]


class Masker(Protocol):
    """What masks rows of ids (R, L) int64 with keys (R,) uint64 and rates (R,) or one for all."""

    def __call__(self, input_ids: np.ndarray, keys: np.ndarray, *, rates: np.ndarray | float) -> MaskedRows: ...


class MaskedToken(NamedTuple):
    """A position of a masked text."""

    piece: str
    """Text of the original token; U+2581 stands for the space before a word."""
    token_id: int
    input_piece: str
    input_id: int
    label: int
    """The original id where the token is to be predicted, and -100 elsewhere."""
    treatment: Treatment | None
    """What became of a token that is to be predicted."""


@dataclass(frozen=True)
class MaskedExample:
    """A text between [CLS] and [SEP] after masking, and the masking rate that it had."""

    tokens: tuple[MaskedToken, ...]
    rate: float

    def count(self, treatment: Treatment) -> int:
        """Return how many tokens had this treatment."""
        return sum(token.treatment == treatment for token in self.tokens)


def needs_pieces(data: DataSettings) -> bool:
    """Return whether masking needs the texts of the vocabulary."""
    return data.masking is not None or data.mask_unit != "token"


def masking_of(
    data: DataSettings, vocab_size: int, special_tokens: SpecialTokens, pieces: Sequence[str] | None
) -> Masking:
    """Return the masking of `data`; `pieces` (vocab_size,) are the texts of all ids, if `needs_pieces`."""
    return Masking(
        data.max_mlm_probability,
        data.mask_share,
        data.random_share,
        vocab_size,
        data.mask_unit,
        None if pieces is None else piece_kinds(pieces),
        data.mean_span_words,
        special_tokens,
        data.masking,
        None if data.masking is None or pieces is None else tuple(pieces),
        data.law if data.law.is_drawn else None,
    )


def masker_of(masking: Masking) -> Masker:
    """Return the masking of this project, or the user's own."""
    if masking.custom is None:
        return partial(mask_rows, masking=masking)
    return CustomMasking(masking.custom, masking).mask_rows


def mask_text(text: str, tokenizer: Tokenizer, data: DataSettings, rate: float, seed: int = 0) -> MaskedExample:
    """Mask a text as training masks a row of this length; the result depends on the text and the seed alone.

    Args:
        rate: share of the tokens to predict; a law that draws the rates of rows draws it from the seed instead.

    Raises:
        UsageError: the text has no tokens.
        UserError: a masking of the user's own fails.
    """
    ids = tokenizer.encode_text(text).astype(np.int64)
    if not len(ids):
        raise UsageError("the text has no tokens", fix="give a sentence", code="empty-text")
    special = tokenizer.special_tokens
    row = np.concatenate([[special.cls], ids, [special.sep]])
    pieces = tokenizer.pieces
    if data.law.is_drawn:
        rate = float(data.law.quantile(uniform(fold(root_key(seed, Purpose.MASKING_RATE), np.arange(1))))[0])
    masking = masking_of(data, tokenizer.vocab_size, special, pieces if needs_pieces(data) else None)
    key = np.array([root_key(seed, Purpose.MASKING)])
    masked = masker_of(masking)(row[None], key, rates=np.array([rate]))
    labels = np.full(len(row), IGNORED)
    used = masked.labels != IGNORED
    labels[masked.masked_positions[used]] = masked.labels[used]
    return MaskedExample(tuple(_described(row, masked.input_ids.reshape(-1), labels, pieces, special)), rate)


def _described(
    row: np.ndarray, seen: np.ndarray, labels: np.ndarray, pieces: Sequence[str], special: SpecialTokens
) -> Iterator[MaskedToken]:
    for original, now, label in zip(row.tolist(), seen.tolist(), labels.tolist(), strict=True):
        treatment: Treatment | None = None
        if label != IGNORED:
            treatment = "masked" if now == special.mask else "unchanged" if now == original else "random"
        yield MaskedToken(pieces[original], original, pieces[now], now, label, treatment)
