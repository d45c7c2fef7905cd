"""Counts of the languages that documents name: a misspelled field or code would silently worsen the sentences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from data_prep.text.sentences import known_language

_SHOWN_CHARACTERS = 40


@dataclass
class DocumentLanguages:
    """Counts of documents whose language was looked up.

    Attributes:
        unnamed: documents that name none.
        unknown: documents that name an unknown one; `first_unknown` is the first such name.
    """

    documents: int = 0
    unnamed: int = 0
    unknown: int = 0
    first_unknown: str = ""

    def add(self, language: str | None) -> None:
        """Count a document that names this language."""
        self.documents += 1
        if language is None:
            self.unnamed += 1
        elif not known_language(language, ""):
            self.unknown += 1
            self.first_unknown = self.first_unknown or language[:_SHOWN_CHARACTERS]

    def merge(self, other: DocumentLanguages) -> None:
        self.documents += other.documents
        self.unnamed += other.unnamed
        self.unknown += other.unknown
        self.first_unknown = self.first_unknown or other.first_unknown

    def warnings(self, field: str) -> Iterator[str]:
        """Warnings: no document names a language in the field, or some name an unknown one."""
        if 0 < self.documents == self.unnamed:
            yield f"none of its {self.documents:,} documents names a language in the field {field!r}"
        if self.unknown:
            yield (
                f"{self.unknown:,} of its documents name a language in the field {field!r} that is unknown (such as "
                f"{self.first_unknown!r}; give codes such as en, de or zh)"
            )
