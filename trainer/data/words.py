"""Word boundaries determined from token ids alone, for masking of whole words.

A word is the text between two spaces: its first token begins with the metaspace (U+2581), the others do not. In
scripts without spaces that would be an entire clause, so there every token is a word. A character that the vocabulary
lacks is several byte tokens, which stay together. Tokens of a foreign vocabulary have the same form
(`data_prep.tokenizer.foreign_files`); they can contain other white space, which counts like the metaspace.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import regex

from data_prep.text.cleaning import METASPACE

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
