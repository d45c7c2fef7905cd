"""What documents say of their own language, watched, since a misspelt field or code would only worsen the sentences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from data_prep.text.sentences import known_language

_SHOWN_CHARACTERS = 40


@dataclass
class DocumentLanguages:
    """Counts of documents that were asked for their language.

    Attributes:
        unnamed: those that name none.
        unknown: those that name one that is not known; `first_unknown` is the first such name.
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
        """What should be told: that no document names a language in the field, or that some name an unknown one."""
        if 0 < self.documents == self.unnamed:
            yield f"none of its {self.documents:,} documents names a language in the field {field!r}"
        if self.unknown:
            yield (
                f"{self.unknown:,} of its documents name a language in the field {field!r} that is not known (such as "
                f"{self.first_unknown!r}; give codes such as en, de or zh)"
            )
