"""The built-in filter `metadata`: thresholds on the fields of a document."""

from __future__ import annotations

from data_prep.documents.document import Document
from data_prep.filters.expression import Condition


class MetadataFilter:
    """Keeps the documents whose metadata satisfies a condition.

    A document without a field that the condition compares is dropped as "no FIELD"; the names `id`, `url`, `source`
    and `language` are those of the document itself.
    """

    version = "1"

    def __init__(self, keep: str) -> None:
        self._condition = Condition(keep)
        self.needs = frozenset(self._condition.fields)

    def __call__(self, document: Document) -> str | None:
        own = {"id": document.id, "url": document.url, "source": document.source, "language": document.language}
        return self._condition({**own, **document.metadata})
