"""JSON lines: one object per line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import BinaryIO, Literal

from data_prep.documents.document import Document
from data_prep.documents.formats.input_format import Cut, Fields, Format, Reading, byte_cuts, document_of, kind_of
from data_prep.documents.formats.text_format import first_line
from data_prep.documents.lines import BYTE_ORDER_MARK, bounded_lines
from data_prep.documents.rejects import BadInput, Fault, check_line_ends, returns_alone

_BRACKETED_JSON = re.compile(rb"\s*(\[\s*([\r\n{]|$)|\{\s*([\r\n]|$))")  # "[", "[{" or "{" is all of the first line


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
