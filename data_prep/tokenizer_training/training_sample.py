"""Training sample of a tokenizer: fair, bounded, independent of the order of documents and the machine.

Every document has a number from 0 to 2**64, the seeded hash of its text, and the documents with the smallest numbers
are the sample: samples of parts of a corpus merge into the sample of the whole. To temper groups, the numbers of a
group are multiplied by one over its weight (sequential Poisson sampling, Ohlsson 1998; the weighted sampling of
Efraimidis and Spirakis 2006 is the same with the exponential of the number). All of it is whole numbers, so that no
machine's rounding decides.

Some documents are held out, chosen by their hash before training, to measure the tokenizer on unseen text.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from decimal import Context, Decimal
from typing import NamedTuple

import xxhash

EVEN = 1 << 32
"""The multiplier of groups that are all alike."""

MAX_LINE_BYTES = 4_192
"""SentencePiece's trainer silently drops longer lines."""

MIN_DOCUMENTS_TO_HOLD_OUT = 200
"""No documents of a smaller source are held out: it is used for both training and measurement."""

MAX_HELD_OUT = 300
"""Number of measured documents of a source."""

_MAX_CHARACTERS = 6_000  # of a held-out document

_HELD_OUT_PART = 20
"""At most one in this number of a source's documents, and of their bytes, is held out."""

_DECIMALS = Context(prec=28)  # its powers are the same on every machine, unlike those of floats


class HeldOutDocument(NamedTuple):
    """Beginning of a document on which the tokenizer is measured.

    Attributes:
        rank: those with the largest are held out: the hash of the text before filters, or of the text itself.
    """

    rank: int
    document_hash: int
    source: str
    language: str
    text: str


class HeldOut:
    """Beginnings of some documents of every source: those with the largest ranks, far from the sample."""

    def __init__(self, floors: Mapping[str, int] | None = None) -> None:
        """`floors` are those that the method gives, of other documents of the corpus."""
        self._floors = floors or {}
        self._heaps: dict[str, list[HeldOutDocument]] = {}

    def add(self, document: HeldOutDocument) -> HeldOutDocument | None:
        """Offer a document; returns its beginning where it is kept for now."""
        if not self.may_hold(document.source, document.rank):
            return None
        heap = self._heaps.setdefault(document.source, [])
        document = document._replace(text=document.text[:_MAX_CHARACTERS])
        if document in heap:
            return None
        heapq.heappush(heap, document)
        if len(heap) > MAX_HELD_OUT:
            heapq.heappop(heap)
        return document

    def may_hold(self, source: str, rank: int) -> bool:
        """Return whether a document of a source with this rank is kept for now, if it is offered."""
        heap = self._heaps.get(source, [])
        return rank > self._floors.get(source, -1) and (len(heap) < MAX_HELD_OUT or rank > heap[0].rank)

    def floors(self) -> dict[str, int]:
        """Return by source the rank up to which no document is needed; without sources of which all are needed."""
        return {name: heap[0].rank for name, heap in self._heaps.items() if len(heap) >= MAX_HELD_OUT}

    def documents(self) -> Iterator[HeldOutDocument]:
        """Yield them by source, the largest rank first."""
        for source in sorted(self._heaps):
            yield from sorted(self._heaps[source], reverse=True)


class TrainingSample:
    """Sample of an entire corpus, with its texts; samples of parts are added document by document."""

    def __init__(self, sample_bytes: int, seed: int) -> None:
        self._sample_bytes, self._seed = sample_bytes, seed
        self._texts: dict[int, tuple[bytes, str, str]] = {}
        self.choice = Choice(sample_bytes)
        self.held_out_documents = HeldOut()

    @property
    def num_documents(self) -> int:
        return len(self._texts)

    @property
    def num_bytes(self) -> int:
        """Bytes of text, at most the budget."""
        return min(self.choice.num_bytes, self._sample_bytes)

    def add(self, paragraphs: list[str], source: str = "", language: str = "") -> None:
        """Offer a document, cleaned; one that was offered before does not count again."""
        text = "\n".join(paragraphs)
        document_hash = hash_of(text, self._seed)
        self.add_text(document_hash, source, language, text)
        self.held_out_documents.add(HeldOutDocument(document_hash, document_hash, source, language, text))

    def add_text(
        self,
        document_hash: int,
        source: str,
        language: str,
        text: str,
        multiplier: int = EVEN,
        rank: int | None = None,
    ) -> None:
        """Offer a cleaned text whose hash is known.

        Args:
            multiplier: of its group by `tempering`.
            rank: the hash of the text before filters, if it is chosen by that.
        """
        encoded = text.encode()[: self._sample_bytes]
        key = key_of(document_hash, multiplier, rank)
        names = [(source, language)]
        if self.choice.key(document_hash) == key:  # the same text again, maybe from another source: the first by name
            names.append(self._texts[document_hash][1:])
        taken, left = self.choice.offer(document_hash, key, len(encoded))
        if taken or len(names) > 1:
            self._texts[document_hash] = encoded, *min(names)
        for other in left:
            del self._texts[other]

    def set_aside(self) -> list[HeldOutDocument]:
        """Take some documents out of the sample, once all were offered; return those to measure, as `held_out` does.

        Where the sample holds nearly all of a source, the source gives up its documents with the largest hashes; one
        with fewer than `MIN_DOCUMENTS_TO_HOLD_OUT` gives none, and is measured on documents that stay in the sample.
        """
        documents, num_bytes = Counter[str](), Counter[str]()
        for encoded, source, _ in self._texts.values():
            documents[source] += 1
            num_bytes[source] += len(encoded)
        candidates = list(self.held_out_documents.documents())
        outside = Counter(document.source for document in candidates if document.document_hash not in self.choice)
        bytes_left = {source: total // _HELD_OUT_PART for source, total in num_bytes.items()}
        for _, document_hash, source, *_ in candidates:
            if document_hash not in self.choice or outside[source] >= _number_to_hold_out(documents[source]):
                continue
            document_bytes = len(self._texts[document_hash][0])
            if document_bytes <= bytes_left[source]:
                bytes_left[source] -= document_bytes
                outside[source] += 1
                self.choice.remove(document_hash, document_bytes)
                del self._texts[document_hash]
        return self.held_out()

    def texts(self) -> Iterator[str]:
        """Yield the sample's documents, one paragraph a line, in the order of keys."""
        for encoded, *_ in self._pieces():
            yield encoded.decode(errors="ignore")

    def bytes_by(self, kind: str) -> Counter[str]:
        """Bytes of the sample's text by "source" or by "language"."""
        counts: Counter[str] = Counter()
        for encoded, *names in self._pieces():
            counts[names[("source", "language").index(kind)]] += len(encoded)
        return counts

    def held_out(self) -> list[HeldOutDocument]:
        """Return the beginnings of documents outside the sample; of a source with none outside, of some inside."""
        documents = list(self.held_out_documents.documents())
        outside = [document for document in documents if document.document_hash not in self.choice]
        with_some = {document.source for document in outside}
        return [d for d in documents if d.document_hash not in self.choice or d.source not in with_some]

    def _pieces(self) -> Iterator[tuple[bytes, str, str]]:
        """The texts, with source and language, in the order of keys; the last is cut where the budget ends."""
        left = self._sample_bytes
        for _, document_hash in self.choice.keys():
            encoded, source, language = self._texts[document_hash]
            yield encoded[:left], source, language
            left -= len(encoded)


def _number_to_hold_out(num_documents: int) -> int:
    return min(MAX_HELD_OUT, num_documents // _HELD_OUT_PART) if num_documents >= MIN_DOCUMENTS_TO_HOLD_OUT else 0


def hash_of(text: str, seed: int) -> int:
    """The 64-bit number by which a cleaned text is chosen."""
    return xxhash.xxh3_64_intdigest(text.encode(), seed=seed)


def lines_of(texts: Iterable[str]) -> Iterator[str]:
    """Yield texts of one paragraph a line as normalized lines below the trainer's length limit."""
    for text in texts:
        for paragraph in text.split("\n"):
            yield from chop(paragraph)


def chop(paragraph: str, max_bytes: int = MAX_LINE_BYTES) -> Iterator[str]:
    """Cut a cleaned paragraph at its spaces into lines of at most `max_bytes`, each with one space before every word.

    A word that is too long for a line is cut between characters.
    """
    paragraph = paragraph.rstrip(" ")  # where the budget cut the text
    max_characters = (max_bytes - 1) // 4
    if len(paragraph) < max_characters:  # most paragraphs fit, whatever their characters are
        if paragraph:
            yield f" {paragraph}"
        return
    if _has_longer_word(paragraph, max_characters):
        parts = (re.findall(f".{{1,{max_characters}}}", word, re.DOTALL) for word in paragraph.split(" "))
        paragraph = " ".join(itertools.chain.from_iterable(parts))
    data = f" {paragraph}".encode()
    start = 0
    while len(data) - start > max_bytes:
        stop = data.rfind(b" ", start + 1, start + max_bytes + 1)
        yield data[start:stop].decode()
        start = stop
    if start < len(data):
        yield data[start:].decode()


def _has_longer_word(paragraph: str, num_characters: int) -> bool:
    """Whether a cleaned paragraph has a word of more characters; looks at one space in so many."""
    start = 0
    while len(paragraph) - start > num_characters:
        space = paragraph.rfind(" ", start, start + num_characters + 1)
        if space < 0:
            return True
        start = space + 1
    return False


class Choice:
    """Choice of the documents with the smallest keys, just enough to fill a byte budget; holds no text."""

    def __init__(self, budget_bytes: int, limit: int | None = None) -> None:
        """`limit` is a key from which on no document is needed, where one is known already."""
        self._budget_bytes = budget_bytes
        self._heap: list[tuple[int, int, int]] = []  # (-key, hash, bytes), so that the largest key is on top
        self._keys: dict[int, int] = {}  # of the chosen, by hash; an entry of the heap with another key is void
        self.num_bytes = 0
        self.limit = limit
        """Documents from this key on are not needed: those below fill the budget."""

    def __contains__(self, document_hash: int) -> bool:
        return document_hash in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def keys(self) -> Iterator[tuple[int, int]]:
        """Yield (key, hash) of the chosen, by key."""
        return iter(sorted((key, document_hash) for document_hash, key in self._keys.items()))

    def key(self, document_hash: int) -> int | None:
        """Return the key of a chosen document, None for any other."""
        return self._keys.get(document_hash)

    def offer(self, document_hash: int, key: int, num_bytes: int) -> tuple[bool, list[int]]:
        """Offer a document; return whether it is chosen, and the hashes of those that it displaces.

        Of equal texts in several groups the one with the smallest key counts.
        """
        if self.limit is not None and key >= self.limit:
            return False, []
        present = self._keys.get(document_hash)
        if present is not None and present <= key:
            return False, []
        self._keys[document_hash] = key
        heapq.heappush(self._heap, (-key, document_hash, num_bytes))
        self.num_bytes += num_bytes if present is None else 0
        return True, self._shrink()

    def remove(self, document_hash: int, num_bytes: int) -> None:
        """Remove a chosen document of that many bytes without replacement."""
        del self._keys[document_hash]  # which makes its entry of the heap void
        self.num_bytes -= num_bytes

    def _shrink(self) -> list[int]:
        """Drop the largest keys while those below them fill the budget."""
        left: list[int] = []
        while True:
            negative, document_hash, num_bytes = self._heap[0]
            if self._keys.get(document_hash) == -negative:
                if self.num_bytes - num_bytes < self._budget_bytes:
                    return left
                self.limit = -negative
                self.num_bytes -= num_bytes
                del self._keys[document_hash]
                left.append(document_hash)
            heapq.heappop(self._heap)


def key_of(document_hash: int, multiplier: int, rank: int | None = None) -> int:
    """The key of a document by its hash, the multiplier of its group, and its rank, by default its hash; no two texts
    have the same.
    """
    return ((document_hash if rank is None else rank) * multiplier << 64) | document_hash


def tempering(bytes_by_group: Mapping[str, int], alpha: float) -> dict[str, int]:
    """Return by which whole number each group's hashes are multiplied: 2**32 times its share to the power 1 - alpha.

    A document's weight is its group's share to the power alpha - 1, so the group's share of a small sample comes to
    share**alpha over the sum of all groups' (Conneau and Lample 2019, section 3.1). With alpha 1 all groups are alike.
    """
    total = max(1, sum(bytes_by_group.values()))
    exponent = 1 - Decimal(str(alpha))
    return {
        group: max(1, int(_DECIMALS.power(_DECIMALS.divide(Decimal(num_bytes), Decimal(total)), exponent) * EVEN))
        for group, num_bytes in bytes_by_group.items()
        if num_bytes
    }
