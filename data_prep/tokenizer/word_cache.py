"""Remembering the ids of words: a bounded cache in front of an encoder, exact because words do not touch.

In a normalized text every word has one space before it, and no piece of the vocabulary reaches across a space, so the
ids of a text are the ids of its words in a row. Where no piece reaches from an ASCII letter to an ASCII character that
is none (SentencePiece learns none that do), the same holds of "word" and the "," after it; so a text is cut there as
well, which leaves far fewer different words. Text is worked on as an array of bytes, all words of a piece at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import numpy as np

from data_prep.text.cleaning import MAX_WORD_BYTES
from data_prep.tokenizer.special_tokens import CLS_TOKEN_ID, PAD_TOKEN_ID

PIECE_BYTES = 1 << 18
"""Text worked on at once; numpy's arrays then stay near the core."""

_NUM_SLOTS = 1 << 20
"""Words that the table holds, 32 bytes each."""

_MAX_LONG_WORDS = 200_000
"""Words kept that no slot holds; about 50 MB at most. Then they are forgotten, and the common ones soon back."""

_MAX_KEPT_BYTES = 64
"""Longer words (Chinese text, data, URLs) hardly ever come twice and are not kept."""

_KEY_BYTES = 16
_SLOT_WORDS = 4
_EMPTY = ~np.uint64(0)  # no word's key: 0xFF is in no UTF-8
_NO_ID, _ELSEWHERE = PAD_TOKEN_ID, CLS_TOKEN_ID  # no text becomes them: filling, and "to be found elsewhere"
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], np.uint64)  # odd and of no pattern, as hashes want them

_SPACE_CLASS, _LETTER_CLASS, _OTHER_ASCII_CLASS, _REST_CLASS = 8, 1, 2, 4
_CROSSING = re.compile("[A-Za-z][\x00-\x1f!-@[-`{-\x7f]|[\x00-\x1f!-@[-`{-\x7f][A-Za-z]")


def can_cut_at_letters(pieces: Iterable[str]) -> bool:
    """Whether no piece of the vocabulary reaches from an ASCII letter to another ASCII character or back."""
    return not any(map(_CROSSING.search, pieces))


class WordCache:
    """Encodes normalized text by looking up its words; not for use by several threads at once.

    The table is two-way set-associative: a word lies in the slot that its hash names or in the next (the slots of a
    pair), under its own bytes as the key, so that a hit is never another word's. A new word whose slot is taken pushes
    out what is in the other of the pair. A slot is half a line of the core's cache (two words of key, one of ids, one
    unused), so that one look at a word is one access to memory.
    """

    def __init__(
        self,
        encode: Callable[[list[str]], list[list[int]]],
        dtype: type[np.unsignedinteger],
        cut_at_letters: bool = False,
        num_slots: int = _NUM_SLOTS,
        max_long_words: int = _MAX_LONG_WORDS,
    ) -> None:
        """`encode` turns texts into ids, never into [PAD] or [CLS]; it is asked for what is not in the cache alone."""
        self._encode, self._dtype = encode, np.dtype(dtype)
        self._ids_per_slot = 8 // self._dtype.itemsize
        self._classes = _byte_classes(cut_at_letters)
        self._shift = np.uint64(64 - (num_slots.bit_length() - 1))
        self._slots = np.full((num_slots, _SLOT_WORDS), _EMPTY)
        self._long_words: dict[bytes, bytes] = {}
        self._max_long_words = max_long_words

    def encode(self, data: bytes) -> np.ndarray:
        """Return the ids of normalized text in UTF-8, (num_tokens,) of the dtype."""
        found = [self._encode_piece(piece) for piece in pieces_of(data)]
        return found[0] if len(found) == 1 else np.concatenate([np.zeros(0, self._dtype), *found])

    def _encode_piece(self, data: bytes) -> np.ndarray:
        starts, lengths = self._cut(data)
        low, high = _keys(data, starts, lengths)
        slots = (low * _FACTORS[0]) ^ (high * _FACTORS[1])
        slots ^= slots >> np.uint64(29)
        slots = ((slots * _FACTORS[0]) >> self._shift).view(np.int64)
        found = self._slots.take(slots, axis=0)
        ids = found[:, 2].copy()
        away = np.flatnonzero((found[:, 0] != low) | (found[:, 1] != high))
        found = self._slots.take(slots[away] ^ 1, axis=0)
        in_second = (found[:, 0] == low[away]) & (found[:, 1] == high[away])
        ids[away] = np.where(in_second, found[:, 2], _first_of_slot(_ELSEWHERE, self._dtype))
        missing = away[~in_second]
        flat: np.ndarray = ids.view(self._dtype)
        flat = flat[flat != _NO_ID]
        if not len(missing):
            return flat
        words = [
            data[start : start + length]
            for start, length in zip(starts[missing].tolist(), lengths[missing].tolist(), strict=True)
        ]
        ids_of_word = self._look_up(words)
        self._remember(ids_of_word, dict(zip(words, missing.tolist(), strict=True)), slots, low, high)
        return _fill_in(flat, [ids_of_word[word] for word in words])

    def _cut(self, data: bytes) -> tuple[np.ndarray, np.ndarray]:
        """Offsets and lengths of the words, each with the space before it."""
        classes = np.frombuffer(data.translate(self._classes), np.uint8)
        is_start = classes == _SPACE_CLASS
        is_start[:1] = True  # also where the piece is a later part of a long word
        is_start[1:] |= (classes[1:] | classes[:-1]) == _LETTER_CLASS | _OTHER_ASCII_CLASS
        starts = np.flatnonzero(is_start)
        return starts, np.diff(starts, append=len(data))

    def _look_up(self, words: list[bytes]) -> dict[bytes, bytes]:
        """The ids, as bytes, of words that the table lacks."""
        found = {word: self._long_words.get(word, b"") for word in words}
        new = [word for word, ids in found.items() if not ids]
        encoded = self._encode([word.decode() for word in new])
        flat = np.fromiter(chain.from_iterable(encoded), self._dtype).tobytes()
        stop = 0
        for word, ids in zip(new, encoded, strict=True):
            start, stop = stop, stop + len(ids) * self._dtype.itemsize
            found[word] = flat[start:stop]
        return found

    def _remember(
        self,
        ids_of_word: dict[bytes, bytes],
        place_of_word: dict[bytes, int],
        slots: np.ndarray,
        low: np.ndarray,
        high: np.ndarray,
    ) -> None:
        slot_bytes = self._ids_per_slot * self._dtype.itemsize
        short: list[bytes] = []
        places: list[int] = []
        long: dict[bytes, bytes] = {}
        for word, ids in ids_of_word.items():
            if len(word) <= _KEY_BYTES and len(ids) <= slot_bytes:
                short.append(ids.ljust(slot_bytes, b"\0"))
                places.append(place_of_word[word])
            elif len(word) <= _MAX_KEPT_BYTES:
                long[word] = ids
        if len(self._long_words) + len(long) > self._max_long_words:
            self._long_words.clear()
        self._long_words.update(long)
        first = slots[places]
        is_taken = self._slots[first, 0] != _EMPTY
        entries = np.stack([low[places], high[places], np.frombuffer(b"".join(short), np.uint64)], axis=1)
        self._slots[first ^ is_taken, :3] = entries


def pieces_of(data: bytes, piece_bytes: int | None = None) -> Iterator[bytes]:
    """Cut normalized text at spaces into pieces of about the size; a longer word makes a longer piece.

    A word of more than MAX_WORD_BYTES, with its space, is cut at each so many bytes from its beginning, or up to three
    before, where a character begins; wherever it stands, and so the parts of a part are itself.
    """
    size = piece_bytes or PIECE_BYTES
    start = 0
    while start < len(data):
        # The word that holds the byte at which the piece is long enough, and whose end is the piece's.
        word = max(start, data.rfind(b" ", start, start + size))
        stop = data.find(b" ", start + size, word + MAX_WORD_BYTES + 1)
        if stop < 0:
            stop = part_stop(data, word)
        yield data[start:stop] if start or stop < len(data) else data
        start = stop


def part_stop(data: bytes, start: int) -> int:
    """Where the part of a long word ends that begins at `start`: MAX_WORD_BYTES on, at a character, or at the end."""
    stop = min(start + MAX_WORD_BYTES, len(data))
    while stop < len(data) and data[stop] & 0xC0 == 0x80:  # within a character
        stop -= 1
    return stop


def parts_of_word(word: bytes) -> list[bytes]:
    """The parts in which a word, with the space before it, is encoded: itself, unless it is too long."""
    parts, start = [], 0
    while start < len(word):
        stop = part_stop(word, start)
        parts.append(word[start:stop])
        start = stop
    return parts


def count_long_words(data: bytes) -> int:
    """How many words of normalized text are encoded in parts."""
    count = start = 0
    while start + MAX_WORD_BYTES < len(data):
        stop = data.find(b" ", start + 1, start + MAX_WORD_BYTES + 1)
        if stop < 0:
            count += 1
            stop = data.find(b" ", start + 1)
            start = len(data) if stop < 0 else stop
        else:
            start = data.rfind(b" ", start + 1, start + MAX_WORD_BYTES + 1)
    return count


def _byte_classes(cut_at_letters: bool) -> bytes:
    """A table for `bytes.translate`; neighbors whose classes are those of letters and of other ASCII are cut apart."""
    classes = np.full(256, _REST_CLASS, np.uint8)
    if cut_at_letters:
        classes[:128] = [_LETTER_CLASS if chr(byte).isalpha() else _OTHER_ASCII_CLASS for byte in range(128)]
    classes[ord(" ")] = _SPACE_CLASS
    return classes.tobytes()


_LENGTHS = range(_KEY_BYTES + 1)
_LOW_MASKS = np.array([(1 << 8 * min(length, 8)) - 1 for length in _LENGTHS] + [0], np.uint64)
_HIGH_MASKS = np.array([(1 << 8 * max(length - 8, 0)) - 1 for length in _LENGTHS] + [0], np.uint64)


def _keys(data: bytes, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first and second eight bytes of each word, filled up with zeros; both 0 for a longer word."""
    padded = data + bytes(_KEY_BYTES)
    at_any_byte = np.ndarray((len(data) + 8 + 1,), "<u8", padded, strides=(1,))
    known = np.minimum(lengths, _KEY_BYTES + 1)
    return at_any_byte[starts] & _LOW_MASKS[known], at_any_byte[starts + 8] & _HIGH_MASKS[known]


def _first_of_slot(value: int, dtype: np.dtype) -> np.uint64:
    """A slot with this id and no other in it."""
    slot = np.zeros(8 // dtype.itemsize, dtype)
    slot[0] = value
    whole: np.uint64 = slot.view(np.uint64)[0]
    return whole


def _fill_in(ids: np.ndarray, others: list[bytes]) -> np.ndarray:
    """Put the ids of the others, in their order, where the mark for them stands."""
    is_mark = ids == _ELSEWHERE
    counts = np.fromiter(map(len, others), np.int64, len(others)) // ids.itemsize
    stops = np.cumsum(counts)
    values = np.frombuffer(b"".join(others), ids.dtype)
    # Where each other's ids begin: after the marks' neighbors that stand before it, and after the others before it.
    begins = np.flatnonzero(is_mark) - np.arange(len(counts)) + stops - counts
    is_other = np.zeros(len(ids) - len(counts) + len(values), bool)
    is_other[np.repeat(begins - stops + counts, counts) + np.arange(len(values))] = True
    filled = np.empty(len(is_other), ids.dtype)
    filled[is_other] = values
    filled[~is_other] = ids[~is_mark]
    return filled
