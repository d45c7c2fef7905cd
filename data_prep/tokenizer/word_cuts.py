"""Safe cuts of normalized text, which change no token: between characters that are adjacent in no token.

BPE only ever merges neighbors into a piece of the vocabulary. So no merge crosses a boundary between two characters
that stand side by side in no piece, and the ids of both sides are independent. A space is always such a boundary.
With byte fallback an unknown character becomes ids of its own; without it neighbors that are unknown become one [UNK]
together, so that text may be cut at spaces alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

_SPACE_CLASS, _LETTER_CLASS, _OTHER_ASCII_CLASS, _REST_CLASS = 8, 1, 2, 4
_CROSSING = re.compile("[A-Za-z][\x00-\x1f!-@[-`{-\x7f]|[\x00-\x1f!-@[-`{-\x7f][A-Za-z]")

_TABLE_BITS = 20
_FIRST_FACTOR, _SECOND_FACTOR = np.uint32(0x9E3779B1), np.uint32(0x85EBCA6B)  # odd, without a pattern, for hashing
_DENSE = 16  # pairs are looked up where at least one byte in so many belongs to a character that is not ASCII


class WordCuts:
    """Division of a text into words: the parts that are encoded independently of each other."""

    def __init__(self, pieces: Iterable[str] | None) -> None:
        """`pieces`: the text of all that can be merged, with plain spaces; None to cut at spaces alone."""
        pieces = None if pieces is None else list(pieces)
        self._pairs = None if pieces is None else _pair_table(pieces)
        self._classes = _byte_classes(pieces is not None and can_cut_at_letters(pieces))

    def starts(self, data: bytes) -> np.ndarray:
        """Return the offsets of the words of normalized text, (num_words,) int64, rising from 0."""
        buffer = np.frombuffer(data, np.int8)
        if self._pairs is not None and not data.isascii() and np.count_nonzero(buffer < 0) * _DENSE >= len(data):
            return _starts_by_pairs(data, buffer, self._pairs)
        classes = np.frombuffer(data.translate(self._classes), np.uint8)
        is_start = classes == _SPACE_CLASS
        is_start[:1] = True  # also where the text is a later part of a long word
        is_start[1:] |= (classes[1:] | classes[:-1]) == _LETTER_CLASS | _OTHER_ASCII_CLASS
        return np.flatnonzero(is_start)


def can_cut_at_letters(pieces: Iterable[str]) -> bool:
    """Whether no piece holds an ASCII letter beside an ASCII character that is neither a letter nor a space."""
    return not any(map(_CROSSING.search, pieces))


def _starts_by_pairs(data: bytes, buffer: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    codes = np.frombuffer(data.decode().encode("utf-32-le"), np.uint32)
    is_start = codes == ord(" ")
    is_start[:1] = True
    is_start[1:] |= ~pairs.take(_hashed(codes[:-1], codes[1:]))
    character_starts = np.flatnonzero(buffer >= -64)  # all bytes but 0x80 to 0xBF, which continue a character
    starts: np.ndarray = character_starts[is_start]
    return starts


def _pair_table(pieces: Iterable[str]) -> np.ndarray:
    """(2 ** _TABLE_BITS,) bool: true at the hash of every two neighbors in a piece, and by chance at others.

    A boundary that is true by chance is not cut, which changes no id.
    """
    codes = np.frombuffer("\n".join(pieces).encode("utf-32-le", "surrogatepass"), np.uint32)
    inside = (codes[:-1] != ord("\n")) & (codes[1:] != ord("\n"))
    table = np.zeros(1 << _TABLE_BITS, bool)
    table[_hashed(codes[:-1][inside], codes[1:][inside])] = True
    return table


def _hashed(firsts: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    hashes: np.ndarray = firsts * _FIRST_FACTOR
    hashes += seconds * _SECOND_FACTOR
    hashes >>= np.uint32(32 - _TABLE_BITS)
    return hashes


def _byte_classes(cut_at_letters: bool) -> bytes:
    """A table for `bytes.translate`; neighbors whose classes are those of letters and of other ASCII are cut apart."""
    classes = np.full(256, _REST_CLASS, np.uint8)
    if cut_at_letters:
        classes[:128] = [_LETTER_CLASS if chr(byte).isalpha() else _OTHER_ASCII_CLASS for byte in range(128)]
    classes[ord(" ")] = _SPACE_CLASS
    return classes.tobytes()
