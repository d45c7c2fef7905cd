"""Reading documents from input files as a stream: text, JSON lines and Parquet.

A `.txt` file is one document, or holds documents parted by blank lines. A `.jsonl` or `.json` file holds one JSON
object a line, a `.parquet` file one row a document, with the text in a field or column that the settings name. Text
files may end in .gz, .zst, .bz2 or .xz as well. What cannot be read is a `BadInput`, which names the file and line.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Literal

from data_prep import storage
from data_prep.compression import COMPRESSIONS, DAMAGE, decompress, detect_compression
from data_prep.config import DocumentSettings
from data_prep.errors import UsageError
from data_prep.formats import Document, Fields, Part, blocks_of_text, json_lines, one_text, parquet_rows
from data_prep.hashing import HashingFile, read_bytes_of
from data_prep.lines import BYTE_ORDER_MARK
from data_prep.parquet import DamagedParquet, ParquetRows, looks_like_parquet
from data_prep.rejects import BadInput, Rejects

_TEXT_FORMATS = (".txt", ".jsonl", ".json")
_HEAD_BYTES = 1 << 10
_BRACKETED_JSON = re.compile(rb"\s*(\[\s*([\r\n{]|$)|\{\s*([\r\n]|$))")  # "[", "[{" or "{" is all of the first line


@dataclass(frozen=True)
class InputUnit:
    """A piece of work on the inputs: a whole file or a part of one.

    Attributes:
        start: first byte of a text file's part, which takes the lines or blocks that begin in it; of a Parquet file,
            the number of the first row group.
        stop: where the next part begins.
        whole: it is all of the file.
        bytes: its share of the file's size, to show progress.
    """

    url: str
    start: int
    stop: int
    whole: bool
    source: int
    bytes: int = 0


def file_format(url: str) -> tuple[str, str]:
    """Format and compression of a file by its name, such as (".jsonl", ".gz"), (".txt", "") or (".parquet", "").

    Raises:
        UsageError: its ending is none that is read here.
    """
    name = (storage.redact(url) if url.startswith(("http://", "https://")) else url).lower()
    if name.endswith(".parquet"):
        return ".parquet", ""
    compression = next((ending for ending in COMPRESSIONS if name.endswith(ending)), "")
    for ending in _TEXT_FORMATS:
        if name.removesuffix(compression).endswith(ending):
            return ending, compression
    raise UsageError(
        f"input {storage.redact(url)} has an ending that is not read here; inputs end in .parquet, or in "
        f"{' '.join(_TEXT_FORMATS)}, each of these also with {' '.join(COMPRESSIONS)} after it"
    )


def cannot_be_split(url: str) -> bool:
    """Whether a file is one unit whatever its size: a compressed one can only be read from its beginning."""
    return bool(file_format(url)[1])


def split_into_units(
    url: str,
    file_bytes: int,
    unit_bytes: int,
    source: int,
    txt_documents: Literal["file", "blank_lines"] = "file",
) -> list[InputUnit]:
    """The units of a file: parts of about `unit_bytes` of plain text where it can be split.

    Raises:
        UserError: a Parquet file's footer cannot be fetched.
    """
    ending, compression = file_format(url)
    if ending == ".parquet":
        return _split_parquet(url, file_bytes, unit_bytes, source)
    is_one = bool(compression) or (ending == ".txt" and txt_documents == "file")
    parts = 1 if is_one else max(1, file_bytes // unit_bytes)
    cuts = [file_bytes * part // parts for part in range(parts + 1)]
    return [
        InputUnit(url, start, stop, parts == 1, source, stop - start)
        for start, stop in zip(cuts[:-1], cuts[1:], strict=True)
    ]


def unit_sha256(unit: InputUnit, settings: DocumentSettings, text_field: str | None = None) -> str:
    """`DocumentReader.sha256` of a unit, without a look at its documents, which may be damaged."""
    ending, _ = file_format(unit.url)
    with storage.open_read(unit.url) as raw:
        if ending != ".parquet":
            return _hashing(raw, unit, b"").hexdigest()
        try:
            rows = _rows(raw, unit)
        except DamagedParquet:
            return storage.sha256_of(unit.url)
        rows.hash_columns(_fields(settings, text_field))
        return rows.sha256()


class DocumentReader:
    """Iterates over the documents of a unit; `text_field` goes before that of the settings.

    When it is exhausted, `dropped` counts what was left out, by reason, and standard error has been told. `sha256`
    then is the digest of what was read: of a whole text file that of its bytes, of a part of one that of the bytes
    of its range, of Parquet that of the columns' raw bytes.

    Raises:
        BadInput: input cannot be read and the policy is `error`; or, with either policy, the file turns out damaged
            or to be something else, maybe after documents of it have been given out (`spoils_file`): the caller
            drops what it has of the unit.
        UserError: the disk or the connection fails.
    """

    def __init__(self, unit: InputUnit, settings: DocumentSettings, text_field: str | None = None) -> None:
        self.sha256 = ""
        self._unit = unit
        self._settings = settings
        self._fields = _fields(settings, text_field)
        self._rejects = Rejects(unit.url, settings, is_part=not unit.whole)

    @property
    def dropped(self) -> Counter[str]:
        return self._rejects.dropped

    def __iter__(self) -> Iterator[Document]:
        try:
            yield from self._documents()
        except BadInput as error:
            if error.spoils_file and self._settings.on_bad_input == "skip":
                self._rejects.warn_spoiled(error)
            raise
        self._rejects.warn()

    def _documents(self) -> Iterator[Document]:
        ending, compression = file_format(self._unit.url)
        with storage.open_read(self._unit.url) as raw:
            head = read_bytes_of(raw, _HEAD_BYTES, self._rejects.where)
            if not head:
                self.sha256 = hashlib.sha256().hexdigest()
                return
            _check_ending(head, self._rejects.where, ending, compression)
            yield from self._parquet(raw) if ending == ".parquet" else self._text(raw, head, ending, compression)

    def _text(self, raw: BinaryIO, head: bytes, ending: str, compression: str) -> Iterator[Document]:
        hashed = _hashing(raw, self._unit, head)
        limit = self._settings.max_document_bytes
        part = Part(0, None) if self._unit.whole else Part(self._unit.start, self._unit.stop)
        try:
            stream = decompress(hashed, compression)
            if compression:
                head = stream.peek(_HEAD_BYTES)[:_HEAD_BYTES]  # type: ignore[attr-defined]
            _check_content(head, self._rejects.where, ending)
            if ending != ".txt":
                yield from json_lines(stream, part, limit, self._fields, self._rejects)
            elif self._settings.txt_documents == "blank_lines":
                yield from blocks_of_text(stream, part, limit, self._rejects)
            else:
                yield from one_text(stream, limit, self._rejects)
        except DAMAGE as error:
            raise self._damaged(COMPRESSIONS[compression], error) from None
        self.sha256 = hashed.hexdigest()

    def _parquet(self, raw: BinaryIO) -> Iterator[Document]:
        try:
            rows = _rows(raw, self._unit)
            rows.hash_columns(self._fields)
            yield from parquet_rows(rows, self._settings.max_document_bytes, self._fields, self._rejects)
        except DamagedParquet as error:
            raise self._damaged("Parquet", error) from None
        self.sha256 = rows.sha256()

    def _damaged(self, what: str, error: Exception) -> BadInput:
        advice = "fetch it again"
        if self._settings.on_bad_input == "error":
            advice += ", or leave it out with documents.on_bad_input=skip"
        message = f"{self._rejects.where} is damaged or cut short ({what}: {error}); {advice}"
        return BadInput(message, "damaged file", spoils_file=True)


def _split_parquet(url: str, file_bytes: int, unit_bytes: int, source: int) -> list[InputUnit]:
    """Ranges of row groups; a file that is no Parquet is one unit, so that its reader refuses it or counts it."""
    whole = InputUnit(url, 0, 0, True, source, file_bytes)
    if not file_bytes:
        return [whole]
    try:
        with storage.open_read(url) as file:
            groups = _rows(file, whole).row_groups()
    except DamagedParquet:
        return [whole]
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
    return [
        InputUnit(url, cuts[i], cuts[i + 1], len(cuts) == 2, source, shares[i + 1] - shares[i])
        for i in range(len(cuts) - 1)
    ]


def _fields(settings: DocumentSettings, text_field: str | None) -> Fields:
    return Fields(text_field or settings.text_field, settings.language_field)


def _rows(raw: BinaryIO, unit: InputUnit) -> ParquetRows:
    return ParquetRows(raw, storage.redact(unit.url), unit.start, None if unit.whole else unit.stop)


def _hashing(raw: BinaryIO, unit: InputUnit, head: bytes) -> HashingFile:
    """The file from the byte before the unit's range on, which tells whether a line begins with it.

    `head` is what has been read of the file, at whose beginning some servers cannot go back to.
    """
    where = storage.redact(unit.url)
    if not unit.start:
        return HashingFile(raw, where, None if unit.whole else unit.stop, head)
    raw.seek(unit.start - 1)
    return HashingFile(raw, where, unit.stop - unit.start + 1)


def _check_ending(head: bytes, where: str, ending: str, compression: str) -> None:
    """Refuse a file whose first bytes are not what its ending says."""
    wanted = ".parquet" if ending == ".parquet" else compression
    found = detect_compression(head) or (".parquet" if looks_like_parquet(head) else "")
    if found == wanted:
        return
    names = {ending: f"{name}-compressed" for ending, name in COMPRESSIONS.items()} | {".parquet": "a Parquet file"}
    is_now = f"is {names[found]}" if found else f"is not {names[wanted]}"
    remedy = f"rename it to end in {found}" if found else f"rename it without {wanted}, or fetch it again"
    raise BadInput(f"{where} {is_now}, other than its ending says; {remedy}", "wrong ending", spoils_file=True)


def _check_content(head: bytes, where: str, ending: str) -> None:
    """Refuse a file of which parts might be documents by chance."""
    if ending == ".txt" and 0 in head:
        what = f"is no text: it holds NUL (byte {head.index(0)} of the file)"
        raise BadInput(f"{where} {what}; convert it to UTF-8, or take it out", "binary", spoils_file=True)
    if ending != ".txt" and _BRACKETED_JSON.match(head.removeprefix(BYTE_ORDER_MARK)):
        what = (
            "line 1 begins an array of JSON objects, or an object of several lines, and one object a line is wanted; "
            "rewrite an array with jq -c '.[]' FILE and objects with jq -c . FILE"
        )
        raise BadInput(f"{where} {what}", "invalid JSON", spoils_file=True)
