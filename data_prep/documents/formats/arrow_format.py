"""Arrow files, as the library `datasets` saves them: sequences of record batches, in which a row is a document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from data_prep.documents.document import Document
from data_prep.documents.formats.input_format import NAME_THE_FIELD, Format, Reading, document_of, listed, value_at
from data_prep.documents.rejects import Fault
from data_prep.storage.arrow_stream import ArrowRows, looks_like_arrow


class ArrowFormat(Format):
    """`.arrow` and `.feather`: streams, and the file format that wraps one. A file is one unit."""

    endings = (".arrow", ".feather")
    kind = "an Arrow file"

    def documents(self, stream: BinaryIO, reading: Reading) -> Iterator[Document]:
        fields, rejects = reading.fields, reading.rejects
        rows = ArrowRows(stream)
        if fields.text.partition(".")[0] not in rows.columns and fields.text not in rows.columns:
            what = f"has no column {fields.text!r} (its columns: {listed(rows.columns)})"
            rejects.bad("", Fault(what, "missing field", NAME_THE_FIELD), rows.count())
            return
        wanted = {name for field in fields.names for name in (field, field.partition(".")[0])}
        for number, values in enumerate(rows.values([name for name in rows.columns if name in wanted]), 1):
            text = value_at(values, fields.text)
            if isinstance(text, str) and len(text) > reading.limit // 4 and len(text.encode()) > reading.limit:
                rejects.too_long(len(text.encode()))
                continue
            try:
                document = document_of(values, fields)
            except Fault as fault:
                rejects.bad(f"row {number}", fault)
            else:
                rejects.place = f"row {number}"
                yield document

    def matches(self, head: bytes) -> bool:
        return looks_like_arrow(head)
