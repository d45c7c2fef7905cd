"""Tables with a header: comma-separated values with quotation marks (RFC 4180), and tab-separated ones without.

A quoted cell may hold line ends, and every row needs the header, so a table is one unit whatever its size. Cells of
`documents.metadata_fields` that are numbers in JSON are numbers.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from data_prep.documents.document import Document
from data_prep.documents.formats.input_format import NAME_THE_FIELD, Format, Reading, document_of, listed
from data_prep.documents.lines import Line, bounded_lines
from data_prep.documents.rejects import BadInput, Fault, check_line_ends, returns_alone

_SEPARATORS = ",;|\t"
_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,19})(\.[0-9]{1,30})?([eE][-+]?[0-9]{1,2})?")


class CsvFormat(Format):
    """`.csv`: cells between commas, quotation marks around those that hold commas, quotation marks or line ends."""

    endings = (".csv",)
    has_quotes = True

    def documents(self, stream: BinaryIO, reading: Reading) -> Iterator[Document]:
        rejects, fields = reading.rejects, reading.fields
        lines = _Lines(stream, reading, self.has_quotes)
        rows = self._rows(lines, reading)
        header = next(rows, None)
        if header is None:
            return
        names = [cell.strip() for cell in header]
        fault = _header_fault(names, fields.names, fields.text)
        if fault is not None:
            rejects.bad("line 1", fault, sum(not _is_blank(row) for row in rows))
            return
        numeric = set(fields.metadata) - {fields.text, fields.language, fields.id, fields.url}
        for row in rows:
            if lines.num_bytes > reading.limit:
                rejects.too_long(lines.num_bytes)
                continue
            if _is_blank(row):
                continue
            try:
                _check_no_header(row, names, f"{rejects.where} line {lines.first.number}")
                if len(row) != len(names):
                    what = f"has {len(row)} cells, and the header has {len(names)}"
                    if fields.text in row:
                        what += "; it looks like the header of another table, which needs a file of its own"
                    if not self.has_quotes and any('"' in cell for cell in row):
                        what += "; quotation marks have no meaning in TSV"
                        raise Fault(what, "invalid CSV", "write the table as CSV, whose quoted cells may hold anything")
                    raise Fault(what, "invalid CSV")
                cells = ((name, cell) for name, cell in zip(names, row, strict=True) if name in fields.names)
                values: dict[str, Any] = {
                    name: _text(cell, name) for name, cell in cells if cell or name == fields.text
                }
                values |= {name: _number(cell) for name, cell in values.items() if name in numeric}
                document = document_of(values, fields)
            except Fault as found:
                rejects.bad_line(lines.first, found)
            else:
                if document.text.strip():
                    rejects.at_line(lines.first)
                    yield document
                else:
                    rejects.bad_line(lines.first, Fault(f"has no text in {fields.text!r}", "missing field"))

    def check_content(self, head: bytes, where: str) -> None:
        check_line_ends(head, where)

    def _rows(self, lines: _Lines, reading: Reading) -> Iterator[list[str]]:
        """Yield the rows; a wrong quotation mark spoils the file, because all rows after it could be read wrongly."""
        reader = csv.reader(lines, strict=True)
        # It is of the process: no cell of a row that is read is larger than the limit on lines.
        csv.field_size_limit(max(csv.field_size_limit(), reading.limit))
        while True:
            lines.begin_row()
            try:
                row = next(reader, None)
            except csv.Error as error:
                found = Fault(
                    f"is not CSV ({error})",
                    "invalid CSV",
                    "write quotation marks within a cell twice and close every quoted cell",
                )
                if "new-line character" in str(error) and lines.first.number == 1:
                    found = returns_alone()
                elif "new-line character" in str(error):
                    what = "is not CSV: it has a carriage return outside quotation marks"
                    found = Fault(what, found.reason, "put the cell in quotation marks, or end lines with line feeds")
                place = f"{reading.rejects.where} line {lines.first.number}"
                raise BadInput(f"{place} {found.what}", found.reason, spoils_file=True, fix=found.remedy) from None
            if row is None:
                return
            yield row


class TsvFormat(CsvFormat):
    """`.tsv`: cells between tabs; quotation marks are ordinary characters, and no cell holds a tab or a line end."""

    endings = (".tsv",)
    has_quotes = False

    def _rows(self, lines: _Lines, reading: Reading) -> Iterator[list[str]]:
        parts = iter(lines)
        while True:
            lines.begin_row()
            line = next(parts, None)
            if line is None:
                return
            yield line.removesuffix("\n").split("\t") if line.strip() else []


class _Lines:
    """Lines of a table for the parser; `first` and `num_bytes` describe the row being read."""

    def __init__(self, stream: BinaryIO, reading: Reading, are_quoted: bool) -> None:
        self._are_quoted = are_quoted
        self._lines = bounded_lines(stream, reading.limit)
        self._reading = reading
        self._last: Line | None = None
        self.first = Line(0, 1, 0, b"")
        self.num_bytes = 0
        self._begins = True

    def begin_row(self) -> None:
        self._begins, self.num_bytes = True, 0

    def __iter__(self) -> Iterator[str]:
        for line in self._lines:
            if self._begins:
                self.first, self._begins = line._replace(data=b""), False
            self.num_bytes += line.num_bytes
            if self.num_bytes > self._reading.limit and self._are_quoted:
                # Most likely a quotation mark is never closed; the row's end cannot be found without reading it all.
                raise BadInput(
                    f"{self._reading.rejects.where} line {self.first.number} begins a row of more than "
                    f"documents.max_document_bytes={self._reading.limit}",
                    "invalid CSV",
                    spoils_file=True,
                    fix="close the quotation mark, or raise documents.max_document_bytes",
                )
            # Invalid UTF-8 is refused with its cell. Line ends other than \n are removed here.
            yield line.data.decode(errors="surrogateescape").replace("\r\n", "\n")


def _check_no_header(row: Sequence[str], names: Sequence[str], where: str) -> None:
    """Refuse a row that is the header once more, as where tables were joined to one file.

    Raises:
        Fault: it is the same header.
        BadInput: its columns are in another order, so all rows after it would be read wrongly.
    """
    if not row or row[0].strip() not in names:
        return
    cells = [cell.strip() for cell in row]
    if cells == names:
        raise Fault("repeats the header: several tables were joined to this file", "repeated header", "remove the line")
    if sorted(cells) == sorted(names):
        raise BadInput(
            f"{where} is the header of another table, whose columns are in another order",
            "repeated header",
            spoils_file=True,
            fix="divide the file there: every table needs a file of its own",
        )


def _is_blank(row: Sequence[str]) -> bool:
    """Whether the row is a blank line, or a single cell without text."""
    return not row or (len(row) == 1 and not row[0].strip())


def _header_fault(names: Sequence[str], wanted: Sequence[str], text: str) -> Fault | None:
    if any("\r" in name for name in names):
        return returns_alone()
    if text not in names:
        if not all(map(_is_utf8, names)):
            return Fault("is not UTF-8", "invalid UTF-8", "convert the file, for example with iconv")
        mark = next((mark for mark in _SEPARATORS if len(names) == 1 and text in names[0].split(mark)), None)
        if mark is not None:
            return Fault(f"has {mark!r} between its cells", "invalid CSV", "write commas in .csv and tabs in .tsv")
        what = f"has no column {text!r} (its columns: {listed(names)})"
        return Fault(what, "missing field", NAME_THE_FIELD)
    twice = next((name for name in wanted if names.count(name) > 1), None)
    return None if twice is None else Fault(f"has several columns {twice!r}", "not text", "rename all but one")


def _is_utf8(text: str) -> bool:
    """Return whether the bytes of a name are UTF-8; others were read as surrogates."""
    return text.encode(errors="replace").decode() == text


def _number(cell: str) -> str | int | float:
    """Return a number as in JSON; any other cell, and one with leading zeros such as 007, stays text."""
    if not _NUMBER.fullmatch(cell):
        return cell
    return int(cell) if cell.lstrip("-").isdigit() else float(cell)


def _text(cell: str, name: str) -> str:
    if "\0" in cell:
        raise Fault(f"is not text: it contains NUL in {name!r}", "binary")
    if not cell.isascii() and any("\udc80" <= character <= "\udcff" for character in cell):
        raise Fault(f"is not UTF-8 in {name!r}", "invalid UTF-8")
    return cell
