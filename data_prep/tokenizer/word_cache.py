"""Remembering the ids of words: a bounded cache in front of an encoder, exact because words are independent.

In a normalized text every word has one space before it, and no piece of the vocabulary reaches across a space, so the
ids of a text are the ids of its words in a row. `word_cuts` cuts further where that changes no id, which leaves far
fewer different words, also of text without spaces. Text is worked on as an array of bytes, all words of a piece at
once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np

from data_prep.text.cleaning import MAX_WORD_BYTES
from data_prep.tokenizer.special_tokens import CLS_TOKEN_ID, PAD_TOKEN_ID
from data_prep.tokenizer.word_cuts import WordCuts

PIECE_BYTES = 1 << 18
"""Text worked on at once; numpy's arrays then stay near the core."""

_NUM_SLOTS = 1 << 20
"""Words that the table holds, 32 bytes each."""

_MAX_OTHERS = 200_000
"""Words kept that fit no slot; about 50 MB at most. Then all are forgotten, and the common ones soon return."""

_MAX_KEPT_BYTES = 64
"""Longer words (data, URLs) hardly ever occur twice and are not kept."""

_KEY_BYTES = 16
_SLOT_WORDS = 4
_EMPTY = np.uint64(0)  # no word's key, which is inverted: 0xFF is in no UTF-8
_NO_ID, _ELSEWHERE = PAD_TOKEN_ID, CLS_TOKEN_ID  # no text becomes these: padding of a slot, and "not in the table"
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], np.uint64)  # odd, without a pattern, for hashing


class WordCache:
    """Encodes normalized text by looking up its words; not for use by several threads at once.

    The table is two-way set-associative: a word is in the slot that its hash names or in the other one of the pair,
    with its own bytes as the key, so that a hit is never another word's. A new word whose slot is taken replaces the
    word in the other slot of the pair. A slot is half a cache line (two words of key, one of ids, one unused), so that
    one look-up is one access to memory.
    """

    def __init__(
        self,
        encode: Callable[[list[bytes]], list[list[int]]],
        dtype: type[np.unsignedinteger],
        pieces: Iterable[str] | None = None,
        num_slots: int = _NUM_SLOTS,
        max_others: int = _MAX_OTHERS,
    ) -> None:
        """Create an empty cache.

        Args:
            encode: turns texts in UTF-8 into ids, never into [PAD] or [CLS]; called for words that are not cached.
            pieces: as `WordCuts` takes them.
        """
        self._encode, self._dtype = encode, np.dtype(dtype)
        self._ids_per_slot = 8 // self._dtype.itemsize
        self._cuts = WordCuts(pieces)
        self._shift = np.uint64(64 - (num_slots.bit_length() - 1))
        self._slots = np.zeros((num_slots, _SLOT_WORDS), np.uint64)
        self._others: dict[bytes, bytes] = {}
        self._max_others = max_others

    def encode(self, data: bytes) -> np.ndarray:
        """Return the ids of normalized text in UTF-8, (num_tokens,) of the dtype."""
        found = [self._encode_piece(piece) for piece in pieces_of(data)]
        return found[0] if len(found) == 1 else np.concatenate([np.zeros(0, self._dtype), *found])

    def _encode_piece(self, data: bytes) -> np.ndarray:
        starts = self._cuts.starts(data)
        lengths = np.diff(starts, append=len(data))
        low, high = _keys(data, starts, lengths)
        hashes = (low * _FACTORS[0]) ^ (high * _FACTORS[1])
        hashes ^= hashes >> np.uint64(29)
        hashes *= _FACTORS[0]
        slots = (hashes >> self._shift).view(np.int64)
        found = self._slots.take(slots, axis=0)
        ids = found[:, 2].copy()
        away = np.flatnonzero((found[:, 0] != low) | (found[:, 1] != high))
        found = self._slots.take(slots[away] ^ 1, axis=0)
        in_second = (found[:, 0] == low[away]) & (found[:, 1] == high[away])
        ids[away] = np.where(in_second, found[:, 2], _first_of_slot(_ELSEWHERE, self._dtype))
        flat: np.ndarray = ids.view(self._dtype)
        flat = flat[flat != _NO_ID]
        missing = away[~in_second]
        if not len(missing):
            return flat
        missing_words = _distinct(data, starts[missing], lengths[missing], low[missing], high[missing], hashes[missing])
        firsts, word_of_occurrence, words = missing_words
        runs, is_new = self._look_up(words)
        self._remember(words, runs, is_new, slots[missing[firsts]], low[missing[firsts]], high[missing[firsts]])
        return _fill_in(flat, runs.take(word_of_occurrence))

    def _look_up(self, words: list[bytes]) -> tuple[_Runs, np.ndarray]:
        """Return the ids of words that the table lacks, and which words, (W,) bool, were encoded now."""
        known = [self._others.get(word) for word in words]
        is_new = np.array([ids is None for ids in known], bool)
        encoded = self._encode([word for word, ids in zip(words, known, strict=True) if ids is None])
        old = b"".join([ids for ids in known if ids is not None])
        counts = np.empty(len(words), np.int64)
        counts[is_new] = np.fromiter(map(len, encoded), np.int64, len(encoded))
        counts[~is_new] = [len(ids) // self._dtype.itemsize for ids in known if ids is not None]
        new_counts, old_counts = counts[is_new], counts[~is_new]
        new = np.fromiter(chain.from_iterable(encoded), self._dtype, int(new_counts.sum()))
        begins = np.empty(len(words), np.int64)
        begins[is_new] = np.cumsum(new_counts) - new_counts
        begins[~is_new] = len(new) + np.cumsum(old_counts) - old_counts
        return _Runs(np.concatenate([new, np.frombuffer(old, self._dtype)]), begins, counts), is_new

    def _remember(
        self,
        words: list[bytes],
        runs: _Runs,
        is_new: np.ndarray,
        slots: np.ndarray,
        low: np.ndarray,
        high: np.ndarray,
    ) -> None:
        """Keep the new words: in the slots given if they fit there, else among the others unless they are too long."""
        lengths = np.fromiter(map(len, words), np.int64, len(words))
        fits = is_new & (lengths <= _KEY_BYTES) & (runs.counts <= self._ids_per_slot)
        others = np.flatnonzero(is_new & ~fits & (lengths <= _MAX_KEPT_BYTES)).tolist()
        if len(self._others) + len(others) > self._max_others:
            self._others.clear()
        for number in others:
            begin = runs.begins[number]
            self._others[words[number]] = runs.values[begin : begin + runs.counts[number]].tobytes()
        in_slot = np.arange(self._ids_per_slot)
        indices = runs.begins[fits][:, None] + in_slot
        ids = runs.values.take(indices, mode="clip")
        ids[in_slot >= runs.counts[fits][:, None]] = _NO_ID
        first = slots[fits]
        is_taken = self._slots[first, 0] != _EMPTY
        self._slots[first ^ is_taken, :3] = np.stack([low[fits], high[fits], ids.view(np.uint64)[:, 0]], axis=1)


class _Runs(NamedTuple):
    """Runs of ids: run i is `values[begins[i] : begins[i] + counts[i]]`."""

    values: np.ndarray
    begins: np.ndarray
    counts: np.ndarray

    def take(self, numbers: np.ndarray) -> _Runs:
        return _Runs(self.values, self.begins[numbers], self.counts[numbers])


def _distinct(
    data: bytes, starts: np.ndarray, lengths: np.ndarray, low: np.ndarray, high: np.ndarray, hashes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, list[bytes]]:
    """The different words among occurrences (n,).

    Returns the number of an occurrence of each word (W,), the number of each occurrence's word (n,), and the words. By
    a rare chance (equal hashes) a short word is there twice, which does no harm.
    """
    word_of_occurrence = np.empty(len(starts), np.int64)
    # Short words are equal where their keys are; sorted by hashes, equal ones are neighbors.
    short = np.flatnonzero(lengths <= _KEY_BYTES)
    order = short[np.argsort(hashes[short])]
    differs = np.ones(len(order), bool)
    differs[1:] = (low[order[1:]] != low[order[:-1]]) | (high[order[1:]] != high[order[:-1]])
    word_of_occurrence[order] = np.cumsum(differs) - 1
    firsts = order[differs]
    words = _slices(data, starts[firsts], lengths[firsts])
    long = np.flatnonzero(lengths > _KEY_BYTES)
    if len(long):
        number_of_word: dict[bytes, int] = {}
        long_words = _slices(data, starts[long], lengths[long])
        word_of_occurrence[long] = [number_of_word.setdefault(word, len(number_of_word)) for word in long_words]
        _, firsts_of_long = np.unique(word_of_occurrence[long], return_index=True)
        word_of_occurrence[long] += len(words)
        firsts = np.concatenate([firsts, long[firsts_of_long]])
        words += number_of_word
    return firsts, word_of_occurrence, words


def _slices(data: bytes, starts: np.ndarray, lengths: np.ndarray) -> list[bytes]:
    return [data[start:stop] for start, stop in zip(starts.tolist(), (starts + lengths).tolist(), strict=True)]


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
    """Return where the part of a long word that begins at `start` ends: at most MAX_WORD_BYTES later."""
    stop = min(start + MAX_WORD_BYTES, len(data))
    while stop < len(data) and data[stop] & 0xC0 == 0x80:  # within a character
        stop -= 1
    return stop


def parts_of_word(word: bytes) -> list[bytes]:
    """Return the parts in which a word, with the space before it, is encoded: the word itself unless it is too long."""
    parts, start = [], 0
    while start < len(word):
        stop = part_stop(word, start)
        parts.append(word[start:stop])
        start = stop
    return parts


def count_long_words(data: bytes) -> int:
    """Return how many words of normalized text are encoded in parts."""
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


_LENGTHS = range(_KEY_BYTES + 1)
_LOW_MASKS = np.array([(1 << 8 * min(length, 8)) - 1 for length in _LENGTHS] + [0], np.uint64)
_HIGH_MASKS = np.array([(1 << 8 * max(length - 8, 0)) - 1 for length in _LENGTHS] + [0], np.uint64)


def _keys(data: bytes, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first (inverted) and second eight bytes of each word, filled up with zeros; no bytes of a longer word."""
    padded = data + bytes(_KEY_BYTES)
    at_any_byte = np.ndarray((len(data) + 8 + 1,), "<u8", padded, strides=(1,))
    known = np.minimum(lengths, _KEY_BYTES + 1)
    low = at_any_byte[starts] & _LOW_MASKS[known]
    return np.invert(low, out=low), at_any_byte[starts + 8] & _HIGH_MASKS[known]


def _first_of_slot(value: int, dtype: np.dtype) -> np.uint64:
    """Return a slot that holds this id alone."""
    slot = np.zeros(8 // dtype.itemsize, dtype)
    slot[0] = value
    whole: np.uint64 = slot.view(np.uint64)[0]
    return whole


def _fill_in(ids: np.ndarray, others: _Runs) -> np.ndarray:
    """Put the runs, in order, in place of their marks."""
    is_mark = ids == _ELSEWHERE
    counts = others.counts
    stops = np.cumsum(counts)
    within = np.arange(stops[-1])
    # Where each run begins in the result: after the other ids before its mark, and after the runs before it.
    offsets = np.flatnonzero(is_mark) - np.arange(len(counts))
    is_other = np.zeros(len(ids) - len(counts) + len(within), bool)
    is_other[np.repeat(offsets, counts) + within] = True
    filled = np.empty(len(is_other), ids.dtype)
    filled[is_other] = others.values[np.repeat(others.begins - stops + counts, counts) + within]
    filled[~is_other] = ids[~is_mark]
    return filled
