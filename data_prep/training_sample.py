"""The documents a tokenizer learns from: a fair, bounded sample that depends on neither their order nor the machine."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator

import xxhash

_HELD_OUT_DOCUMENTS = 64
_HELD_OUT_CHARACTERS = 20_000

MAX_LINE_BYTES = 4_192
"""SentencePiece's trainer silently drops longer lines."""

_RESERVED_CHARACTER = "\u2585"
"""SentencePiece's trainer silently drops lines that hold it."""


class TrainingSample:
    """Keeps the documents with the smallest seeded hashes, just enough of them to fill the byte budget.

    A few documents with the largest hashes are kept too, to try the finished tokenizer on text it has not seen.
    """

    def __init__(self, sample_bytes: int, seed: int) -> None:
        self._sample_bytes, self._seed = sample_bytes, seed
        self._bytes = 0
        self._heap: list[tuple[int, bytes]] = []  # (-hash, UTF-8), so that the largest hash is on top
        self._hashes: set[int] = set()
        self._limit = 1 << 64  # documents from this hash on are not needed: those below fill the budget
        self._held_out: list[tuple[int, str]] = []

    @property
    def num_documents(self) -> int:
        return len(self._heap)

    @property
    def num_bytes(self) -> int:
        """Bytes of text, at most the budget."""
        return min(self._bytes, self._sample_bytes)

    def add(self, paragraphs: list[str]) -> None:
        """Offer a document, cleaned; one that was offered before does not count again."""
        text = "\n".join(paragraphs)
        encoded = text.encode()
        number = xxhash.xxh3_64_intdigest(encoded, seed=self._seed)
        self._offer_held_out(number, text)
        if number >= self._limit or number in self._hashes:
            return
        kept = encoded[: self._sample_bytes]
        heapq.heappush(self._heap, (-number, kept))
        self._hashes.add(number)
        self._bytes += len(kept)
        while self._bytes - len(self._heap[0][1]) >= self._sample_bytes:
            negative, dropped = heapq.heappop(self._heap)
            self._limit = -negative
            self._hashes.remove(-negative)
            self._bytes -= len(dropped)

    def lines(self) -> Iterator[str]:
        """Yield the sample as the trainer wants it: normalised lines below its length limit, in the order of hashes."""
        left = self._sample_bytes
        for _, encoded in sorted(self._heap, reverse=True):
            for paragraph in encoded[:left].decode(errors="ignore").split("\n"):
                yield from chop(paragraph.replace(_RESERVED_CHARACTER, " "))
            left -= len(encoded)

    def held_out(self) -> list[str]:
        """Return the beginnings of documents outside the sample; of some inside where there are no others."""
        outside = [text for number, text in self._held_out if number not in self._hashes]
        return outside or [text for _, text in self._held_out]

    def _offer_held_out(self, number: int, text: str) -> None:
        item = (number, text[:_HELD_OUT_CHARACTERS])
        if item in self._held_out:
            return
        if len(self._held_out) < _HELD_OUT_DOCUMENTS:
            heapq.heappush(self._held_out, item)
        else:
            heapq.heappushpop(self._held_out, item)


def chop(paragraph: str, max_bytes: int = MAX_LINE_BYTES) -> Iterator[str]:
    """Cut a paragraph at its spaces into lines of at most `max_bytes`, each with one space before every word.

    A word that is too long for a line is cut between characters.
    """
    line, line_bytes = [], 0
    for word in _short_words(paragraph, (max_bytes - 1) // 4):
        word_bytes = len(word.encode()) + 1
        if line_bytes + word_bytes > max_bytes:
            yield " " + " ".join(line)
            line, line_bytes = [], 0
        line.append(word)
        line_bytes += word_bytes
    if line:
        yield " " + " ".join(line)


def _short_words(paragraph: str, max_characters: int) -> Iterator[str]:
    for word in paragraph.split():
        yield from re.findall(f".{{1,{max_characters}}}", word, re.DOTALL) if len(word) > max_characters else (word,)
