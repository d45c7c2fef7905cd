"""Formats of tables with an index or batches of their own, Parquet and Arrow, in which a row is a document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO, Literal

from data_prep.documents.document import Document
from data_prep.documents.formats.input_format import (
    NAME_THE_FIELD,
    Cut,
    Fields,
    Format,
    Outline,
    Part,
    Reading,
    document_of,
    listed,
    value_at,
)
from data_prep.documents.rejects import Fault
from data_prep.storage import storage
from data_prep.storage.arrow_stream import ArrowRows, looks_like_arrow
from data_prep.storage.hashing_files import RangeHashingFile
from data_prep.storage.parquet import DamagedTable, ParquetRows, looks_like_parquet

_NOT_COMPRESSED_GROWTH = 3.0  # its columns are compressed


class ParquetFormat(Format):
    """`.parquet`; it is read from its end, so a compressed file is unpacked to a temporary file first."""

    endings = (".parquet",)
    growth = _NOT_COMPRESSED_GROWTH
    kind = "a Parquet file"
    needs_seeking = True

    def documents(self, stream: BinaryIO, reading: Reading) -> Iterator[Document]:
        assert isinstance(stream, RangeHashingFile)
        rows, fields, rejects = (
            ParquetRows(stream, reading.part.start, reading.part.stop),
            reading.fields,
            reading.rejects,
        )
        try:
            names = _columns_to_read(rows, fields)
        except Fault as fault:
            rejects.bad("", fault, rows.num_rows)  # of an empty file under the policy `skip` nothing
            return
        others = [name for name in names if name not in (fields.text, fields.language)]
        for number, values in enumerate(rows.values(names, others), rows.first_row + 1):
            text = values[0]
            if text is not None and len(text) > reading.limit:
                rejects.too_long(len(text))
                continue
            try:
                document = _row_document(dict(zip(names, values, strict=True)), fields)
            except Fault as fault:
                rejects.bad(f"row {number}", fault)
            else:
                rejects.place = f"row {number}"
                yield document

    def outline(self, file: RangeHashingFile, part: Part, fields: Fields) -> Outline:
        rows = ParquetRows(file, part.start, part.stop)
        if part.start == 0:
            rows.check_all_described()
        return Outline(rows.column_ranges(fields.names), rows.num_rows)

    def cuts(
        self, url: str, file_bytes: int, unit_bytes: int, txt_documents: Literal["file", "blank_lines"]
    ) -> list[Cut]:
        """Return ranges of row groups; a file that is not Parquet is one unit, which its reader refuses or counts."""
        whole = [Cut(0, 0, file_bytes)]
        if not file_bytes:
            return whole
        try:
            with storage.open_read(url) as file:
                groups = ParquetRows(RangeHashingFile(file, storage.redact(url))).row_groups()
        except DamagedTable:
            return whole
        cuts, plain_bytes = [0], 0
        for number, group in enumerate(groups):
            if plain_bytes and plain_bytes + group.plain_bytes > unit_bytes:
                cuts.append(number)
                plain_bytes = 0
            plain_bytes += group.plain_bytes
        cuts.append(len(groups))
        stored = sum(group.stored_bytes for group in groups)
        shares = [sum(group.stored_bytes for group in groups[:cut]) * file_bytes // max(stored, 1) for cut in cuts]
        shares[-1] = file_bytes
        return [Cut(cuts[i], cuts[i + 1], shares[i + 1] - shares[i]) for i in range(len(cuts) - 1)]

    def matches(self, head: bytes) -> bool:
        return looks_like_parquet(head)


def _columns_to_read(rows: ParquetRows, fields: Fields) -> list[str]:
    """Return the names of the columns to read, the text column first; the others may be absent."""
    found = {name: rows.column_type(name) for name in fields.names}
    top_level = [name for name, _ in rows.columns]
    if found[fields.text] is None:
        what = f"has no column {fields.text!r} (its columns: {listed(top_level)})"
        raise Fault(what, "missing field", NAME_THE_FIELD)
    names = [name for name in fields.names if found[name] is not None]
    for name in names:
        if top_level.count(name if name in top_level else name.partition(".")[0]) > 1:
            raise Fault(f"has several columns {name!r}", "not text", "rename all but one")
        if name in (fields.text, fields.language) and not rows.is_text(name):
            columns = listed([f"{column} {kind}" for column, kind in rows.columns])
            raise Fault(f"has {found[name]} in column {name!r}, not text (its columns: {columns})", "not text")
    return names


def _row_document(values: dict[str, Any], fields: Fields) -> Document:
    text, language = values[fields.text], values.get(fields.language or "")
    if text is None:
        raise Fault(f"has null for {fields.text!r}, not text", "missing field")
    try:
        values[fields.text] = text.decode()
        if language is not None:
            values[fields.language or ""] = language.decode()
    except UnicodeDecodeError as error:
        raise Fault(f"is not UTF-8 (byte {error.start})", "invalid UTF-8") from None
    return document_of(values, fields)


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
