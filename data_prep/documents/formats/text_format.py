"""Formats of text: whole files or blocks between blank lines, and JSON lines with one object per line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import BinaryIO, Literal

from data_prep.config.preparation_config import DocumentSettings
from data_prep.documents.document import Document
from data_prep.documents.formats.input_format import (
    Cut,
    Fields,
    Format,
    Part,
    Reading,
    byte_cuts,
    decoded,
    document_of,
    kind_of,
)
from data_prep.documents.lines import BYTE_ORDER_MARK, Line, blank_line_blocks, bounded_lines, skip_to_line
from data_prep.documents.rejects import BadInput, Fault, check_line_ends, returns_alone

_BUFFER_BYTES = 1 << 20
_PARAGRAPHS_OF_RETURNS = re.compile(rb"\r[ \t]*\r(?!\n)")
_BRACKETED_JSON = re.compile(rb"\s*(\[\s*([\r\n{]|$)|\{\s*([\r\n]|$))")  # "[", "[{" or "{" is all of the first line


class TextFormat(Format):
    """`.txt`, divided as `documents.txt_documents` sets."""

    endings = (".txt",)
    has_fields = False

    def documents(self, stream: BinaryIO, reading: Reading) -> Iterator[Document]:
        if reading.settings.txt_documents == "blank_lines":
            return _blocks(stream, reading)
        return _whole(stream, reading)

    def cuts(
        self, url: str, file_bytes: int, unit_bytes: int, txt_documents: Literal["file", "blank_lines"]
    ) -> list[Cut]:
        if txt_documents == "file":
            return [Cut(0, file_bytes, file_bytes)]
        return byte_cuts(file_bytes, unit_bytes)

    def is_one_document(self, settings: DocumentSettings) -> bool:
        return settings.txt_documents == "file"

    def check_content(self, head: bytes, where: str) -> None:
        if 0 in head:
            raise BadInput(
                f"{where} is not text: it contains NUL (byte {head.index(0)} of the file)",
                "binary",
                spoils_file=True,
                fix="convert it to UTF-8, or remove it from the inputs",
            )


def first_line(stream: BinaryIO, part: Part) -> int:
    """Move from the byte before the part to the first line that begins in it; return that line's position."""
    return skip_to_line(stream, part.start - 1, part.stop or part.start) if part.start else 0


def _whole(stream: BinaryIO, reading: Reading) -> Iterator[Document]:
    """Yield the whole stream as one document; nothing if it is white space."""
    data = stream.read(reading.limit + 1)
    num_bytes = len(data)
    if num_bytes > reading.limit:
        while piece := stream.read(_BUFFER_BYTES):
            num_bytes += len(piece)
        reading.rejects.too_long(num_bytes)
        return
    marked = len(BYTE_ORDER_MARK) if data.startswith(BYTE_ORDER_MARK) else 0
    try:
        text = decoded(data[marked:])
    except Fault as fault:
        what = f"{fault.what} (byte {marked + fault.position} of the file)"
        reading.rejects.bad(
            "", Fault(what, fault.reason, "convert it, for example with iconv, or remove it from the inputs")
        )
    else:
        if text.strip():
            yield Document(text, source=reading.fields.source)


def _blocks(stream: BinaryIO, reading: Reading) -> Iterator[Document]:
    """Yield the documents of a part, which blank lines separate."""
    part, rejects = reading.part, reading.rejects
    position = first_line(stream, part)
    if part.stop is not None and position >= part.stop:
        return
    lines = bounded_lines(stream, reading.limit, position)
    for block in blank_line_blocks(lines, reading.limit, part.start == 0, part.stop):
        if block.num_bytes > reading.limit:
            rejects.too_long(block.num_bytes)
            continue
        if _PARAGRAPHS_OF_RETURNS.search(block.data) and b"\n" not in block.data.rstrip():
            rejects.bad_line(block, returns_alone())
            continue
        try:
            document = Document(decoded(block.data), source=reading.fields.source)
        except Fault as fault:
            before = block.data[: fault.position]
            start = before.rfind(b"\n") + 1
            line = Line(block.start + start, block.number + before.count(b"\n"), 0, b"")
            rejects.bad_line(line, Fault(f"{fault.what} (byte {fault.position - start} of the line)", fault.reason))
        else:
            rejects.at_line(block)
            yield document


class JsonLinesFormat(Format):
    """`.jsonl` and `.json`."""

    endings = (".jsonl", ".json")

    def documents(self, stream: BinaryIO, reading: Reading) -> Iterator[Document]:
        rejects = reading.rejects
        for line in bounded_lines(stream, reading.limit, first_line(stream, reading.part), reading.part.stop):
            if line.num_bytes > reading.limit:
                rejects.too_long(line.num_bytes)
            elif line.data.strip():
                try:
                    document = _document(line.data, reading.fields)
                except Fault as fault:
                    rejects.bad_line(line, fault)
                else:
                    rejects.at_line(line)
                    del line  # it is as large as the document, which is worked on meanwhile
                    yield document

    def cuts(
        self, url: str, file_bytes: int, unit_bytes: int, txt_documents: Literal["file", "blank_lines"]
    ) -> list[Cut]:
        return byte_cuts(file_bytes, unit_bytes)

    def check_content(self, head: bytes, where: str) -> None:
        check_line_ends(head, where)
        if _BRACKETED_JSON.match(head.removeprefix(BYTE_ORDER_MARK)):
            raise BadInput(
                f"{where} line 1 begins an array of JSON objects, or an object of several lines; JSON lines contain "
                "one object per line",
                "invalid JSON",
                spoils_file=True,
                fix="rewrite an array with jq -c '.[]' FILE and objects with jq -c . FILE",
            )


def _document(data: bytes, fields: Fields) -> Document:
    try:
        values = json.loads(data.decode())
    except UnicodeDecodeError as error:
        raise Fault(f"is not UTF-8 (byte {error.start} of the line)", "invalid UTF-8") from None
    except (ValueError, RecursionError) as error:
        if b"\r" in data.strip():
            raise returns_alone() from None
        raise Fault(f"is not JSON ({error})", "invalid JSON") from None
    if not isinstance(values, dict):
        raise Fault(f"holds {kind_of(values)}, not an object with a field {fields.text!r}", "no object")
    return document_of(values, fields)
