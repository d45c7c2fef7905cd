"""From the bytes of each input format to its documents; what is none is handed to `Rejects`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

from data_prep.documents.lines import BYTE_ORDER_MARK, Line, blank_line_blocks, bounded_lines, skip_to_line
from data_prep.documents.rejects import Fault, Rejects
from data_prep.storage.parquet import ParquetRows, is_text

_BUFFER_BYTES = 1 << 20
_SHOWN_NAMES = 10
_SHOWN_CHARACTERS = 40
_NAME_THE_FIELD = "name it with documents.text_field=NAME, or with the source's own text_field"


class Document(NamedTuple):
    """A document as it stands in the input.

    Attributes:
        text: not cleaned; may hold lone surrogates, where JSON escapes say so.
        language: what the field that names it holds; None where that is empty.
    """

    text: str
    language: str | None


class Fields(NamedTuple):
    """The fields of a JSON object, or the columns, that a document is made of."""

    text: str
    language: str | None


class Part(NamedTuple):
    """A byte range of a file; of the whole file (0, None)."""

    start: int
    stop: int | None


def one_text(stream: BinaryIO, limit: int, rejects: Rejects) -> Iterator[Document]:
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
            yield Document(text, None)


def blocks_of_text(stream: BinaryIO, part: Part, limit: int, rejects: Rejects) -> Iterator[Document]:
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
            document = Document(_decoded(block.data), None)
        except _NotText as error:
            before = block.data[: error.position]
            start = before.rfind(b"\n") + 1
            line = Line(block.start + start, block.number + before.count(b"\n"), 0, b"")
            rejects.bad_line(line, Fault(f"{error.what} (byte {error.position - start} of the line)", error.reason))
        else:
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
                del line  # it is as large as the document, which is worked on meanwhile
                yield document


def parquet_rows(rows: ParquetRows, limit: int, fields: Fields, rejects: Rejects) -> Iterator[Document]:
    """The documents of row groups of a Parquet file.

    Raises:
        DamagedParquet: the file is damaged.
    """
    try:
        names = _text_columns(rows.columns, fields)
    except Fault as fault:
        rejects.bad("", fault, rows.num_rows)  # of an empty file under the policy `skip` nothing
        return
    for number, values in enumerate(rows.values(names), rows.first_row + 1):
        text, language = values[0], values[1] if len(values) > 1 else None
        if text is not None and len(text) > limit:
            rejects.too_long(len(text))
            continue
        try:
            document = _row_document(text, language, fields)
        except Fault as fault:
            rejects.bad(f"row {number}", fault)
        else:
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
    return Document(text, language or None)


def _text_columns(columns: Sequence[tuple[str, Any]], fields: Fields) -> list[str]:
    """Names of the columns to read: that of the text, and that of the language where there is one."""
    types = dict(columns)
    if fields.text not in types:
        what = f"has no column {fields.text!r} (its columns: {_listed([name for name, _ in columns])})"
        raise Fault(what, "missing field", _NAME_THE_FIELD)
    names = [name for name in dict.fromkeys(fields) if name in types]
    for name in names:
        if [column for column, _ in columns].count(name) > 1:
            raise Fault(f"has several columns {name!r}", "not text", "rename all but one")
        if not is_text(types[name]):
            listed = _listed([f"{column} {kind}" for column, kind in columns])
            raise Fault(f"has {types[name]} in column {name!r}, not text (its columns: {listed})", "not text")
    return [name for name in names if name is not None]


def _row_document(text: bytes | None, language: bytes | None, fields: Fields) -> Document:
    if text is None:
        raise Fault(f"has null for {fields.text!r}, not text", "missing field")
    try:
        return Document(text.decode(), (language or b"").decode() or None)
    except UnicodeDecodeError as error:
        raise Fault(f"is not UTF-8 (byte {error.start})", "invalid UTF-8") from None


def _listed(names: Sequence[str]) -> str:
    shown = [name if len(name) <= _SHOWN_CHARACTERS else f"{name[:_SHOWN_CHARACTERS]}..." for name in names]
    return ", ".join(shown[:_SHOWN_NAMES]) + (", ..." if len(shown) > _SHOWN_NAMES else "") or "none"


def _kind(value: Any) -> str:
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), "null")
