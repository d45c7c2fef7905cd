"""From the bytes of each input format to its documents; what is none is handed to `Rejects`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

from data_prep.documents.document import Document
from data_prep.documents.lines import BYTE_ORDER_MARK, Line, blank_line_blocks, bounded_lines, skip_to_line
from data_prep.documents.rejects import Fault, Rejects
from data_prep.storage.parquet import ParquetRows, is_text

_BUFFER_BYTES = 1 << 20
_SHOWN_NAMES = 10
_SHOWN_CHARACTERS = 40
_NAME_THE_FIELD = "name it with documents.text_field=NAME, or with the source's own text_field"


class Fields(NamedTuple):
    """The fields of a JSON object, or the columns, that a document is made of, and the name of its source."""

    text: str
    language: str | None = None
    id: str | None = None
    url: str | None = None
    metadata: tuple[str, ...] = ()
    source: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Every field once, the text's first."""
        wanted = (self.text, self.language, self.id, self.url, *self.metadata)
        return tuple(dict.fromkeys(name for name in wanted if name is not None))


class Part(NamedTuple):
    """A byte range of a file; of the whole file (0, None)."""

    start: int
    stop: int | None


def one_text(stream: BinaryIO, limit: int, fields: Fields, rejects: Rejects) -> Iterator[Document]:
    """The whole stream as one document; none where it is white space."""
    data = stream.read(limit + 1)
    num_bytes = len(data)
    if num_bytes > limit:
        while piece := stream.read(_BUFFER_BYTES):
            num_bytes += len(piece)
        rejects.too_long(num_bytes)
        return
    marked = len(BYTE_ORDER_MARK) if data.startswith(BYTE_ORDER_MARK) else 0
    try:
        text = _decoded(data[marked:])
    except _NotText as error:
        what = f"{error.what} (byte {marked + error.position} of the file)"
        rejects.bad("", Fault(what, error.reason, "convert it, such as with iconv, or take it out of the inputs"))
    else:
        if text.strip():
            yield Document(text, source=fields.source)


def blocks_of_text(stream: BinaryIO, part: Part, limit: int, fields: Fields, rejects: Rejects) -> Iterator[Document]:
    """Of a part of a text file the documents that blank lines part."""
    position = _first_line(stream, part)
    if part.stop is not None and position >= part.stop:
        return
    lines = bounded_lines(stream, limit, position)
    for block in blank_line_blocks(lines, limit, part.start == 0, part.stop):
        if block.num_bytes > limit:
            rejects.too_long(block.num_bytes)
            continue
        try:
            document = Document(_decoded(block.data), source=fields.source)
        except _NotText as error:
            before = block.data[: error.position]
            start = before.rfind(b"\n") + 1
            line = Line(block.start + start, block.number + before.count(b"\n"), 0, b"")
            rejects.bad_line(line, Fault(f"{error.what} (byte {error.position - start} of the line)", error.reason))
        else:
            rejects.at_line(block)
            yield document


def json_lines(stream: BinaryIO, part: Part, limit: int, fields: Fields, rejects: Rejects) -> Iterator[Document]:
    """Of a part of a file of JSON lines the documents."""
    for line in bounded_lines(stream, limit, _first_line(stream, part), part.stop):
        if line.num_bytes > limit:
            rejects.too_long(line.num_bytes)
        elif line.data.strip():
            try:
                document = _json_document(line.data, fields)
            except Fault as fault:
                rejects.bad_line(line, fault)
            else:
                rejects.at_line(line)
                del line  # it is as large as the document, which is worked on meanwhile
                yield document


def parquet_rows(rows: ParquetRows, limit: int, fields: Fields, rejects: Rejects) -> Iterator[Document]:
    """The documents of row groups of a Parquet file.

    Raises:
        DamagedParquet: the file is damaged.
    """
    try:
        names = _columns_to_read(rows.columns, fields)
    except Fault as fault:
        rejects.bad("", fault, rows.num_rows)  # of an empty file under the policy `skip` nothing
        return
    others = [name for name in names if name not in (fields.text, fields.language)]
    for number, values in enumerate(rows.values(names, others), rows.first_row + 1):
        text = values[0]
        if text is not None and len(text) > limit:
            rejects.too_long(len(text))
            continue
        try:
            document = _row_document(dict(zip(names, values, strict=True)), fields)
        except Fault as fault:
            rejects.bad(f"row {number}", fault)
        else:
            rejects.place = f"row {number}"
            yield document


class _NotText(Exception):
    def __init__(self, what: str, reason: str, position: int) -> None:
        super().__init__(what)
        self.what = what
        self.reason = reason
        self.position = position


def _decoded(data: bytes) -> str:
    if b"\0" in data:
        raise _NotText("is no text: it holds NUL", "binary", data.index(0))
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _NotText("is not UTF-8", "invalid UTF-8", error.start) from None


def _first_line(stream: BinaryIO, part: Part) -> int:
    """Go to the first line that begins in the part, from the byte before it; gives that line's position."""
    return skip_to_line(stream, part.start - 1, part.stop or part.start) if part.start else 0


def _json_document(data: bytes, fields: Fields) -> Document:
    try:
        values = json.loads(data.decode())
    except UnicodeDecodeError as error:
        raise Fault(f"is not UTF-8 (byte {error.start} of the line)", "invalid UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise Fault(f"is not JSON ({error})", "invalid JSON") from None
    if not isinstance(values, dict):
        raise Fault(f"holds {_kind(values)}, not an object with a field {fields.text!r}", "no object")
    if fields.text not in values:
        what = f"has no field {fields.text!r} (its fields: {_listed(list(values))})"
        raise Fault(what, "missing field", _NAME_THE_FIELD)
    text, language = values[fields.text], values.get(fields.language)
    if not isinstance(text, str):
        reason = "missing field" if text is None else "not text"
        raise Fault(f"has {_kind(text)} for {fields.text!r}, not text", reason)
    if language is not None and not isinstance(language, str):
        raise Fault(f"has {_kind(language)} for {fields.language!r}, not text", "not text")
    return _document(text, language, values, fields)


def _document(text: str, language: str | None, values: Mapping[str, Any], fields: Fields) -> Document:
    """The document that these values of fields make; absent ones and None are left out."""
    if fields.id is None and fields.url is None and not fields.metadata:
        return Document(text, source=fields.source, language=language or None)
    return Document(
        text=text,
        id=_text_or_number(values, fields.id),
        source=fields.source,
        language=language or None,
        url=_text_or_number(values, fields.url),
        metadata={name: values[name] for name in fields.metadata if values.get(name) is not None},
    )


def _text_or_number(values: Mapping[str, Any], name: str | None) -> str | None:
    value = None if name is None else values.get(name)
    if value is None or value == "":
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise Fault(f"has {_kind(value)} for {name!r}, not text or an integer", "not text")
    return str(value)


def _columns_to_read(columns: Sequence[tuple[str, Any]], fields: Fields) -> list[str]:
    """Names of the columns to read, the text's first; others than it may be absent."""
    types = dict(columns)
    if fields.text not in types:
        what = f"has no column {fields.text!r} (its columns: {_listed([name for name, _ in columns])})"
        raise Fault(what, "missing field", _NAME_THE_FIELD)
    names = [name for name in fields.names if name in types]
    for name in names:
        if [column for column, _ in columns].count(name) > 1:
            raise Fault(f"has several columns {name!r}", "not text", "rename all but one")
        if name in (fields.text, fields.language) and not is_text(types[name]):
            listed = _listed([f"{column} {kind}" for column, kind in columns])
            raise Fault(f"has {types[name]} in column {name!r}, not text (its columns: {listed})", "not text")
    return names


def _row_document(values: dict[str, Any], fields: Fields) -> Document:
    text, language = values[fields.text], values.get(fields.language or "")
    if text is None:
        raise Fault(f"has null for {fields.text!r}, not text", "missing field")
    try:
        decoded, of_language = text.decode(), (language or b"").decode()
    except UnicodeDecodeError as error:
        raise Fault(f"is not UTF-8 (byte {error.start})", "invalid UTF-8") from None
    # A field that is the text as well, or the language, is bytes here.
    return _document(decoded, of_language, {**values, fields.text: decoded, fields.language or "": of_language}, fields)


def _listed(names: Sequence[str]) -> str:
    shown = [name if len(name) <= _SHOWN_CHARACTERS else f"{name[:_SHOWN_CHARACTERS]}..." for name in names]
    return ", ".join(shown[:_SHOWN_NAMES]) + (", ..." if len(shown) > _SHOWN_NAMES else "") or "none"


def _kind(value: Any) -> str:
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), "null")
