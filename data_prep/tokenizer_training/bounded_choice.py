"""Bounded sample of documents: those with the smallest keys, in any order of input.

Every document has a number from 0 to 2**64, the seeded hash of its text, and the documents with the smallest numbers
are the sample: samples of parts of a corpus merge into the sample of the whole. To temper groups, the numbers of a
group are multiplied by one over its weight (sequential Poisson sampling, Ohlsson 1998; the weighted sampling of
Efraimidis and Spirakis 2006 is the same with the exponential of the number). All of it is whole numbers, so that no
machine's rounding decides.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from decimal import Context, Decimal

EVEN = 1 << 32
"""The multiplier of groups that are all alike."""

_DECIMALS = Context(prec=28)  # its powers are the same on every machine, unlike those of floats


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


def key_of(document_hash: int, multiplier: int) -> int:
    """The key of a document by its hash and the multiplier of its group; no two texts have the same."""
    return (document_hash * multiplier << 64) | document_hash


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
