"""Normalization of many texts at once: their concatenated bytes, and the starts of documents and paragraphs.

The results are those of `cleaning.normalize`, several times as fast: numpy handles white space
of many documents together. A long text is processed in parts, so memory is bounded by its own bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from data_prep.text.cleaning import MAX_WORD_BYTES, Normalization, clean, is_stable

_PIECE_CHARACTERS = 1 << 17  # numpy's arrays of a piece then stay in a core's own cache
_CUT = re.compile("[!-~] [!-~]")  # a space that is neither part of a paragraph break nor followed by a combining mark
_SPACE, _NEWLINE = b" \n"

Item = TypeVar("Item")


@dataclass(frozen=True)
class TextBatch:
    """Concatenated normalized texts; every word has one space before it.

    Attributes:
        data: all texts, UTF-8.
        document_starts: (D + 1,) int64 offsets of the documents in `data`, and its end; an empty document has no bytes.
        paragraph_starts: (P,) int64 offsets of the paragraphs, each at a space; a document begins with one.
    """

    data: bytes
    document_starts: np.ndarray
    paragraph_starts: np.ndarray

    def __len__(self) -> int:
        return len(self.document_starts) - 1

    def document(self, number: int) -> bytes:
        return self.data[self.document_starts[number] : self.document_starts[number + 1]]

    def select(self, kept: np.ndarray) -> TextBatch:
        """Return only the documents of a mask (D,)."""
        if kept.all():
            return self
        lengths = np.diff(self.document_starts)
        gone_before = np.cumsum(np.where(kept, 0, lengths)) - np.where(kept, 0, lengths)
        owners = np.searchsorted(self.document_starts, self.paragraph_starts, "right") - 1
        stays = kept[owners]
        return TextBatch(
            b"".join([self.document(number) for number in np.flatnonzero(kept).tolist()]),
            np.concatenate(([0], np.cumsum(lengths[kept]))),
            self.paragraph_starts[stays] - gone_before[owners[stays]],
        )


def batches(
    items: Iterable[Item], num_characters: Callable[[Item], int], most_characters: int, most_items: int | None = None
) -> Iterator[list[Item]]:
    """Yield the items in lists that bound memory, each ended by the item that reaches one of the limits.

    Args:
        num_characters: of the text of an item.
    """
    batch: list[Item] = []
    held = 0
    for item in items:
        batch.append(item)
        held += num_characters(item)
        if held >= most_characters or len(batch) == most_items:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def normalize_batch(texts: Sequence[str], normalization: Normalization) -> TextBatch:
    """Normalize the texts of documents, in order."""
    parts: list[bytes] = []
    document_starts, paragraph_starts = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    offset = 0
    for pieces, begins in _groups(texts, normalization):
        data, piece_starts, paragraphs = _join([clean(piece, normalization) for piece in pieces], begins)
        parts.append(data)
        document_starts.append(piece_starts[np.array(begins)] + offset)
        paragraph_starts.append(paragraphs + offset)
        offset += len(data)
    return TextBatch(b"".join(parts), np.concatenate([*document_starts, [offset]]), np.concatenate(paragraph_starts))


def _groups(texts: Sequence[str], normalization: Normalization) -> Iterator[tuple[list[str], list[bool]]]:
    """Yield pieces of similar size, each with whether it begins a document."""
    pieces: list[str] = []
    begins: list[bool] = []
    characters = 0
    for text in texts:
        for number, piece in enumerate(_pieces(text, normalization)):
            pieces.append(piece)
            begins.append(number == 0)
            characters += len(piece)
            if characters >= _PIECE_CHARACTERS:
                yield pieces, begins
                pieces, begins, characters = [], [], 0
    if pieces:
        yield pieces, begins


def pieces_of_text(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the original text, a long one in pieces, each with whether it continues a cut word.

    Every piece after the first begins with a space between two ASCII words. A text without such a space in
    MAX_WORD_BYTES of UTF-8 is cut there, at a character.
    """
    start, is_cut = 0, False
    while len(text) - start > _PIECE_CHARACTERS:
        # After a cut the piece ends with the word, so that another long word is a separate one.
        cut = _CUT.search(text, start + _PIECE_CHARACTERS * (not is_cut), start + MAX_WORD_BYTES)
        stop = cut.start() + 1 if cut else len(text)
        if stop - start > MAX_WORD_BYTES // 4:  # else it has no more bytes
            head = text[start : start + MAX_WORD_BYTES].encode()[:MAX_WORD_BYTES].decode(errors="ignore")
            stop = min(stop, start + len(head))
        yield text[start:stop], is_cut
        start, is_cut = stop, not (cut and stop == cut.start() + 1)
    if start < len(text) or not text:
        yield text[start:] if start else text, is_cut


def _pieces(text: str, normalization: Normalization) -> Iterator[str]:
    """Yield the text, a long one in pieces whose separate normalization equals that of the whole.

    Every piece after the first begins with a space between two ASCII words or, in text without such spaces (such as
    Chinese), with a character that joins with nothing.
    """
    start = 0
    while len(text) - start > _PIECE_CHARACTERS:
        found = _CUT.search(text, start + _PIECE_CHARACTERS, start + 2 * _PIECE_CHARACTERS)
        cuts = range(start + _PIECE_CHARACTERS, len(text)) if found is None else [found.start() + 1]
        cut = next((c for c in cuts if found or all(is_stable(each, normalization) for each in text[c - 1 : c + 1])), 0)
        if not cut:
            break
        yield text[start:cut]
        start = cut
    yield text[start:] if start else text


def _join(pieces: Sequence[bytes], begins: Sequence[bool]) -> tuple[bytes, np.ndarray, np.ndarray]:
    """Replace each run of white space by one space; return the text and the offsets of its pieces and paragraphs."""
    # A blank line before each document begins a paragraph. Other pieces begin with their own space.
    parts = [b"\n\n" + piece if begin else piece for piece, begin in zip(pieces, begins, strict=True)]
    buffer = np.frombuffer(b"".join(parts), np.uint8)
    is_space = buffer <= _SPACE
    is_dropped = np.zeros(len(buffer), bool)  # each space but the first of a run
    np.logical_and(is_space[1:], is_space[:-1], out=is_dropped[1:])
    dropped = np.flatnonzero(is_dropped)
    is_newline = buffer == _NEWLINE
    text = np.where(is_newline, _SPACE, buffer)[~is_dropped]
    if is_space[-1]:
        text = text[:-1]
    # All bytes of one run map to its remaining space.
    newlines = np.flatnonzero(is_newline)
    newlines -= np.searchsorted(dropped, newlines, "right")
    is_second = np.append(newlines, -1)[1:] == newlines
    is_second[1:] &= ~is_second[:-1]
    paragraphs = newlines[is_second]
    lengths = np.array([len(part) for part in parts])
    piece_starts = np.cumsum(lengths) - lengths
    piece_starts -= np.searchsorted(dropped, piece_starts, "right")
    return text.tobytes(), piece_starts, paragraphs[paragraphs < len(text)]
