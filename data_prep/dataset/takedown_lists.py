"""Lists of what a takedown names: URLs, corpus ids or document ids, as text, CSV or TSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence

import numpy as np

from data_prep.base.errors import UsageError, UserError
from data_prep.base.logs import logger
from data_prep.storage import storage

DOCUMENT_ID_NAMES = ("document_id", "document")
ID_NAMES = ("id", "ids", "doc_id", "docid", "uid")
URL_NAMES = ("url", "urls", "uri", "link")

_ID = re.compile("[0-9a-fA-F]{16}")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}


def read_list(url: str, names: Sequence[str]) -> list[tuple[int, str]]:
    """Read a list: one value per line (lines that begin with # are comments, white space at both ends does not count),
    or a CSV or TSV file with a header, whose cells count as they are.

    Args:
        names: lower-case names of the column with the values; the column of a table of one may have any name.

    Returns (line number, value) pairs.

    Raises:
        UserError: the file does not exist, is not text, has no such column, or is empty.
    """
    where = storage.redact(url)
    if not storage.exists(url):
        raise UsageError(f"{where} does not exist", fix="give the path or URL of a list", code="missing-path")
    try:
        text = storage.read_bytes(url).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where} is not UTF-8 text (byte {error.start})", fix="give a text, CSV or TSV file", code="invalid-list"
        ) from None
    delimiter = next((sign for ending, sign in _DELIMITERS.items() if url.lower().endswith(ending)), None)
    found = list(_plain_values(text) if delimiter is None else _table_values(text, delimiter, names, where))
    if not found:
        raise UserError(f"{where} lists nothing", fix="give one value per line", code="empty-list")
    return found


def read_document_ids(url: str) -> np.ndarray:
    """Read a list of document ids: 16 hexadecimal digits each, as `inspect` shows them; # begins a comment.

    Returns (n,) uint64, ascending and unique.

    Raises:
        UserError: a value is something else, or there is none.
    """
    ids: list[int] = []
    for number, value in read_list(url, DOCUMENT_ID_NAMES):
        word = value.partition("#")[0].strip()
        if not _ID.fullmatch(word):
            raise UsageError(
                f"{storage.redact(url)} line {number} is not a document id: {word[:40]!r}",
                fix="give the 16 hexadecimal digits that 'inspect' shows, such as 00f3a9c2d4e5b617; for the ids of "
                "your corpus use --ids, for URLs --urls",
                code="malformed-document-id",
            )
        ids.append(int(word, 16))
    return np.unique(np.array(ids, np.uint64))


def _plain_values(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(io.StringIO(text, newline=None), 1):
        if (value := line.strip()) and not value.startswith("#"):
            yield number, value


def _table_values(text: str, delimiter: str, names: Sequence[str], where: str) -> Iterator[tuple[int, str]]:
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        head = [name.strip().lower() for name in next(rows, [])]
        columns = [number for number, name in enumerate(head) if name in names] or ([0] if len(head) == 1 else [])
        if not columns:
            raise UsageError(
                f"{where} line 1 has no column {' or '.join(names)}; its columns are {', '.join(head) or 'none'}",
                fix="name the column with the values in the header",
                code="missing-column",
            )
        if head[columns[0]] not in names and "://" in head[0]:
            raise UsageError(
                f"{where} line 1 is a value, not the name of a column",
                fix=f"begin the file with a line that names the column, such as {names[0]}",
                code="missing-column",
            )
        if head[columns[0]] not in names:
            logger(__name__).warning(f"{where} line 1 is taken as the name of the column: {head[0]!r}")
        for row in rows:
            if row and len(row) != len(head):
                raise UserError(
                    f"{where} line {rows.line_num} has {len(row)} cells, and the header has {len(head)}",
                    fix=f"put quotation marks around a value that holds {delimiter!r}, or give the list as a text file "
                    "with one value per line",
                    code="invalid-list",
                )
            if row and row[columns[0]].strip():
                yield rows.line_num, row[columns[0]]
    except csv.Error as error:
        raise UserError(
            f"{where} line {rows.line_num} is not valid CSV ({error})", fix="correct the line", code="invalid-list"
        ) from None
