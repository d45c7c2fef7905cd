"""A document: a text with its provenance."""

from __future__ import annotations

import json
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
        id: corpus id, the value of `documents.id_field`; else the name of a text file, which filters do not see; None
            where there is none.
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


def numbered(file_name: str, number: int) -> str:
    """Return the id of a document at a position of a file with several documents, such as notes.txt#1843."""
    return f"{file_name}#{number}"


def wrong_values(document: Document) -> str:
    """Return what is not of the types that `Document` states, after "a document whose"; an empty text if nothing."""
    for name in ("text", "id", "url", "language"):
        value = getattr(document, name)
        if not isinstance(value, str) and (value is not None or name == "text"):
            return f"{name} is {type(value).__name__}, not text"
        if name in ("id", "url") and value is not None and has_surrogates(value):
            return f"{name} holds half a surrogate pair, which is not a character"
    if not isinstance(document.metadata, Mapping):
        return f"metadata is {type(document.metadata).__name__}, not a mapping"
    return ""


def has_surrogates(text: str) -> bool:
    """Whether a text holds halves of surrogate pairs, whose replacement would make different ids and URLs equal."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def is_json(values: Mapping[str, Any]) -> bool:
    """Whether JSON can hold the values."""
    try:
        json.dumps(dict(values), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
