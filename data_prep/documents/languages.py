"""Counts of languages and missing fields of documents, so that misspelled field names are noticed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from data_prep.text.sentences import known_language

_SHOWN_CHARACTERS = 40


@dataclass
class DocumentLanguages:
    """Counts of documents whose language was looked up.

    Attributes:
        unnamed: number of documents without a language.
        unknown: number of documents with an unknown language; `first_unknown` is the first such name.
        read: number of all documents.
        absent: number of documents without a value, by field (id, URL and metadata).
    """

    documents: int = 0
    unnamed: int = 0
    unknown: int = 0
    first_unknown: str = ""
    read: int = 0
    absent: dict[str, int] = field(default_factory=dict)

    def add(self, language: str | None) -> None:
        """Count a document of this language."""
        self.documents += 1
        if language is None:
            self.unnamed += 1
        elif not known_language(language, ""):
            self.unknown += 1
            self.first_unknown = self.first_unknown or language[:_SHOWN_CHARACTERS]

    def add_absent(self, names: Iterable[str]) -> None:
        """Count a document that has no value in these fields."""
        self.read += 1
        for name in names:
            self.absent[name] = self.absent.get(name, 0) + 1

    def merge(self, other: DocumentLanguages) -> None:
        self.documents += other.documents
        self.unnamed += other.unnamed
        self.unknown += other.unknown
        self.first_unknown = self.first_unknown or other.first_unknown
        self.read += other.read
        for name, count in other.absent.items():
            self.absent[name] = self.absent.get(name, 0) + count

    def absent_warnings(self) -> Iterator[str]:
        """Yield warnings about fields in which no document has a value."""
        for name, count in sorted(self.absent.items()):
            if count == self.read:
                yield f"none of its {self.read:,} documents has a value in the field {name!r}"

    def warnings(self, field: str) -> Iterator[str]:
        """Yield warnings: no document has a language in the field, or some have an unknown one."""
        if 0 < self.documents == self.unnamed:
            yield f"none of its {self.documents:,} documents names a language in the field {field!r}"
        if self.unknown:
            yield (
                f"{self.unknown:,} of its documents name a language in the field {field!r} that is unknown (such as "
                f"{self.first_unknown!r}; give codes such as en, de or zh)"
            )
