"""The protocols of filters and transforms.

Both are called with a document, and the type of the result decides: None keeps the document, a text drops it
for that reason, a document of the same source and id replaces it. The result must depend only on the document, because
a unit of work may be done twice and in any process. The manifest counts reasons by filter, so they come from a small
fixed set and contain no values of the document.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import numpy as np
import xxhash

from data_prep.documents.rejects import Fault

if TYPE_CHECKING:
    from data_prep.documents.document import Document

UNUSABLE = "cannot be judged"
"""The reason of a filter for documents that it cannot judge, under the policy `skip`."""


class Filter(Protocol):
    """Returns None for a document that stays, or the reason to drop it."""

    def __call__(self, document: Document, /) -> str | None: ...


class Transform(Protocol):
    """Returns the document that replaces a document."""

    def __call__(self, document: Document, /) -> Document: ...


class UnusableDocument(Fault):
    """A filter cannot judge this document, such as one whose score is text.

    Under `documents.on_bad_input=error` preparation stops and names the document; under `skip` it is dropped and
    counted.

    Args:
        fix: what to do, as an imperative; by default to correct the document.
    """

    def __init__(self, problem: str, *, fix: str = "correct it") -> None:
        super().__init__(problem, UNUSABLE, fix)


def hashes_of(entries: Iterable[str]) -> np.ndarray:
    """Return the xxh3_64 of the entries of a filter's list, (n,) uint64, ascending and unique.

    A filter with lists that may grow returns them by name from a method `lists()`.
    """
    hashed = [xxhash.xxh3_64_intdigest(entry.encode(errors="surrogatepass")) for entry in entries]
    return np.unique(np.array(hashed, np.uint64))
