"""A document: a text with its provenance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DOCUMENT_ID = "document_id"
"""Key in the metadata of decoded documents: the hash of the normalized text, 16 hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class Document:
    """A document of the input, before cleaning.

    Attributes:
        text: may contain lone surrogates, from JSON escapes.
        id: corpus id, the value of `documents.id_field`; None where there is none.
        source: name of the source.
        language: the value of `documents.language_field`; None where there is none.
        url: the value of `documents.url_field`; None where there is none.
        metadata: values of `documents.metadata_fields` by the name of the field; absent fields are left out. Values
            are what JSON holds: text, finite numbers, true and false, None, lists and mappings.
    """

    text: str
    id: str | None = None
    source: str = ""
    language: str | None = None
    url: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def document_id(self) -> str | None:
        """The data set's own id, 16 hexadecimal digits, of a document that `open_dataset` decoded; else None."""
        found = self.metadata.get(DOCUMENT_ID)
        return found if isinstance(found, str) else None
