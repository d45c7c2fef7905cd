"""Protocol of input formats, and conversion of field values to a document."""

from __future__ import annotations

import io
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Literal, NamedTuple

from data_prep.config.preparation_config import DocumentSettings
from data_prep.documents.document import Document, has_surrogates
from data_prep.documents.rejects import Fault, Rejects
from data_prep.storage.hashing_files import RangeHashingFile

NAME_THE_FIELD = "name it with documents.text_field=NAME, or with the source's own text_field"
_LISTED_NAMES = 10
_LISTED_CHARACTERS = 40


class Fields(NamedTuple):
    """Names of the JSON fields or columns that make up a document, and the name of its source.

    A name with dots, such as `text.body`, is the field of this very name, else the field `body` of the object `text`.
    """

    text: str
    language: str | None = None
    id: str | None = None
    url: str | None = None
    metadata: tuple[str, ...] = ()
    source: str = ""

    @classmethod
    def of(cls, settings: DocumentSettings, source: str = "") -> Fields:
        """Return the fields of the settings."""
        return cls(
            text=settings.text_field,
            language=settings.language_field,
            id=settings.id_field,
            url=settings.url_field,
            metadata=settings.metadata_fields,
            source=source,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Return every field once, the text field first."""
        wanted = (self.text, self.language, self.id, self.url, *self.metadata)
        return tuple(dict.fromkeys(name for name in wanted if name is not None))


class Part(NamedTuple):
    """A byte range of a file, or a range of its row groups; (0, None) is the whole file."""

    start: int
    stop: int | None


class Cut(NamedTuple):
    """Start and stop of a unit of a file, as in `Part`, and its share of the file's bytes."""

    start: int
    stop: int
    bytes: int


class Outline(NamedTuple):
    """Contents of a part of a file according to the file's own index.

    Attributes:
        ranges: (start, stop) bytes that the documents of the part depend on; none overlap.
        num_rows: rows of the part, including dropped ones.
    """

    ranges: Sequence[tuple[int, int]]
    num_rows: int | None = None


class Reading(NamedTuple):
    """Parameters of reading: everything that a format needs besides the file."""

    part: Part
    settings: DocumentSettings
    fields: Fields
    rejects: Rejects

    @property
    def limit(self) -> int:
        """Maximum length of a document in bytes; longer ones are dropped unread."""
        return self.settings.max_document_bytes


class Format(ABC):
    """A format that is read from the beginning of a stream, which may be decompressed on the way.

    A format with an index of its own, which is read at any position, sets `needs_seeking` and returns an `outline`. Its
    `documents` get a file instead of a stream; a compressed file is unpacked to a temporary file first. A damaged file
    raises `DamagedTable` with the position.

    Attributes:
        endings: file name extensions, such as (".jsonl", ".json").
        growth: approximate bytes of text per byte of an uncompressed file.
        has_fields: whether documents have fields besides the text.
        kind: name of the format in messages; empty if the first bytes do not identify it (`matches`).
        needs_seeking: whether the format is read at any position.
        path: `module:name` of a user's format; empty for a built-in one.
    """

    endings: tuple[str, ...] = ()
    growth: float = 1.0
    has_fields: bool = True
    kind: str = ""
    needs_seeking: bool = False
    path: str = ""

    @abstractmethod
    def documents(self, stream: BinaryIO, reading: Reading) -> Iterator[Document]:
        """Yield the documents of a part; other content goes to `reading.rejects`.

        Raises:
            BadInput: `reading.rejects` raises it; or nothing of the file can be used (`spoils_file`).
        """

    def cuts(
        self, url: str, file_bytes: int, unit_bytes: int, txt_documents: Literal["file", "blank_lines"]
    ) -> list[Cut]:
        """Return the units of an uncompressed file, in order; a single one if it cannot be split."""
        return [Cut(0, file_bytes, file_bytes)]

    def outline(self, file: RangeHashingFile, part: Part, fields: Fields) -> Outline:
        """Return the outline of a part of a file that `needs_seeking`; by default the part is the whole file."""
        return Outline([(0, file.seek(0, io.SEEK_END))])

    def is_one_document(self, settings: DocumentSettings) -> bool:
        """Return whether every file is one document."""
        return False

    def matches(self, head: bytes) -> bool:
        """Return whether the first bytes of a file identify this format, also if the file was truncated."""
        return False

    def check_content(self, head: bytes, where: str) -> None:
        """Refuse content whose parts could be documents by chance.

        Raises:
            BadInput: the content is of another format.
        """
        return


def byte_cuts(file_bytes: int, unit_bytes: int) -> list[Cut]:
    """Return byte ranges of about `unit_bytes` each."""
    parts = max(1, file_bytes // unit_bytes)
    bounds = [file_bytes * part // parts for part in range(parts + 1)]
    return [Cut(start, stop, stop - start) for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]


def document_of(values: Mapping[str, Any], fields: Fields) -> Document:
    """Make a document of an object.

    Raises:
        Fault: the object has no text, or a field has the wrong type.
    """
    text = value_at(values, fields.text)
    if text is ABSENT:
        what = f"has no field {fields.text!r} (its fields: {listed(list(values))})"
        raise Fault(what, "missing field", NAME_THE_FIELD)
    language = None if fields.language is None else value_at(values, fields.language)
    if isinstance(text, bytes):
        raise _not_utf8(text, fields.text)
    if not isinstance(text, str):
        reason = "missing field" if text is None else "not text"
        raise Fault(f"has {kind_of(text)} for {fields.text!r}, not text", reason)
    if isinstance(language, bytes):
        raise _not_utf8(language, fields.language)
    if language is not None and language is not ABSENT and not isinstance(language, str):
        raise Fault(f"has {kind_of(language)} for {fields.language!r}, not text", "not text")
    language = language if isinstance(language, str) and language else None
    if fields.id is None and fields.url is None and not fields.metadata:
        return Document(text, source=fields.source, language=language)
    found = ((name, _json_value(values, name)) for name in fields.metadata)
    return Document(
        text=text,
        id=_text_or_integer(values, fields.id),
        source=fields.source,
        language=language,
        url=_text_or_integer(values, fields.url),
        metadata={name: value for name, value in found if value is not None},
    )


ABSENT = object()


def value_at(values: Mapping[str, Any], name: str) -> Any:
    """Return the value of a field, whose name may be a path with dots; `ABSENT` if there is none."""
    if name in values or "." not in name:
        return values.get(name, ABSENT)
    found: Any = values
    for part in name.split("."):
        found = found.get(part, ABSENT) if isinstance(found, Mapping) else ABSENT
    return found


def _json_value(values: Mapping[str, Any], name: str) -> Any:
    """Return the value of a field as JSON holds it: None if there is none, and for NaN and infinity."""
    value = value_at(values, name)
    if value is ABSENT or value is None or isinstance(value, str | int):
        return None if value is ABSENT else value

    def refused(part: Any) -> Any:
        if isinstance(part, bytes):
            raise _not_utf8(part, name)
        raise TypeError

    try:
        return json.loads(json.dumps(value, default=refused), parse_constant=lambda not_finite: None)
    except (TypeError, ValueError, RecursionError):
        raise Fault(f"has a {type(value).__name__} for {name!r}, which JSON cannot hold", "not text") from None


def _text_or_integer(values: Mapping[str, Any], name: str | None) -> str | None:
    value = ABSENT if name is None else value_at(values, name)
    if value is ABSENT or value is None or value == "":
        return None
    if isinstance(value, bytes):
        raise _not_utf8(value, name)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise Fault(f"has {kind_of(value)} for {name!r}, not text or an integer", "not text")
    if isinstance(value, str) and has_surrogates(value):
        what = f"has half a surrogate pair in {name!r}, which is not a character"
        raise Fault(what, "invalid UTF-8", "write the whole character")
    return str(value)


def _not_utf8(value: bytes, name: str | None) -> Fault:
    """Return the fault of bytes that are not UTF-8: replaced characters would make different ids equal."""
    try:
        start = len(value.decode())
    except UnicodeDecodeError as error:
        start = error.start
    remedy = "write the column as text, such as hexadecimal digits"
    return Fault(f"is not UTF-8 in {name!r} (byte {start})", "invalid UTF-8", remedy)


def decoded(data: bytes) -> str:
    """Return the text of UTF-8 bytes.

    Raises:
        Fault: the bytes are not UTF-8, or contain NUL; it has the position of the first such byte.
    """
    if b"\0" in data:
        raise Fault("is not text: it contains NUL", "binary", position=data.index(0))
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise Fault("is not UTF-8", "invalid UTF-8", position=error.start) from None


def listed(names: Sequence[str]) -> str:
    """Return the first names, shortened, for a message."""
    shortened = [name if len(name) <= _LISTED_CHARACTERS else f"{name[:_LISTED_CHARACTERS]}..." for name in names]
    return ", ".join(shortened[:_LISTED_NAMES]) + (", ..." if len(shortened) > _LISTED_NAMES else "") or "none"


def kind_of(value: Any) -> str:
    """Return the type of a JSON value, for a message."""
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), "null")
