"""Reading documents from input files as a stream: text, JSON lines and Parquet.

A `.txt` file is one document, or holds documents parted by blank lines. A `.jsonl` or `.json` file holds one JSON
object a line, a `.parquet` file one row a document, with the text in a field or column that the settings name. Each
may end in .gz, .zst, .bz2 or .xz as well. What cannot be read is a `BadInput`, which names the file and the line, the
row group or the byte.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from typing import BinaryIO

from data_prep.config.preparation_config import DocumentSettings
from data_prep.documents.document import Document
from data_prep.documents.formats import Fields, Part, blocks_of_text, json_lines, one_text, parquet_rows
from data_prep.documents.input_units import InputUnit, file_format, rows_of
from data_prep.documents.languages import DocumentLanguages
from data_prep.documents.lines import BYTE_ORDER_MARK, damaged_line
from data_prep.documents.rejects import BadInput, Rejects
from data_prep.storage import storage
from data_prep.storage.compression import COMPRESSIONS, DAMAGE, decompress, decompressed_copy, detect_compression
from data_prep.storage.hashing_files import NOTHING_BEYOND, HashingFile, read_bytes_of
from data_prep.storage.parquet import DamagedParquet, looks_like_parquet
from data_prep.text.cleaning import has_too_many_marks

_HEAD_BYTES = 1 << 10
_BRACKETED_JSON = re.compile(rb"\s*(\[\s*([\r\n{]|$)|\{\s*([\r\n]|$))")  # "[", "[{" or "{" is all of the first line


def unit_sha256(unit: InputUnit, settings: DocumentSettings, text_field: str | None = None) -> str:
    """`DocumentReader.sha256` of a unit, without a look at its documents, which may be damaged."""
    with storage.open_read(unit.url) as raw:
        if file_format(unit.url) != (".parquet", ""):
            return _hashing(raw, unit, b"").hexdigest()
        try:
            rows = rows_of(raw, unit)
            rows.hash_columns(_fields(settings, text_field).names)
        except DamagedParquet:
            return storage.sha256_of(unit.url)
        return rows.sha256()


def beyond_sha256(unit: InputUnit, num_bytes: int) -> str:
    """sha256 of so many bytes of the unit's file behind its range, as `DocumentReader.beyond` has it."""
    with storage.open_read(unit.url) as raw:
        raw.seek(unit.stop)
        return HashingFile(raw, storage.redact(unit.url), num_bytes).hexdigest()


class DocumentReader:
    """Iterates over the documents of a unit; `text_field` goes before that of the settings.

    When it is exhausted, `dropped` counts what was left out, by reason, and standard error has been told; `languages`
    counts what the documents named, where the settings have a field for it. `sha256` then is the digest of what was
    read: of a whole text file and of a compressed one that of its bytes, of a part of a text file that of the bytes of
    its range, of Parquet that of the columns' raw bytes. `beyond` tells of what was read behind a part of a text file.
    Of Parquet `num_rows` is known once the reading begins.

    Raises:
        BadInput: input cannot be read and the policy is `error`; or, with either policy, the file turns out damaged
            or to be something else, maybe after documents of it have been given out (`spoils_file`): the caller
            drops what it has of the unit.
        UserError: the disk or the connection fails.
    """

    def __init__(
        self, unit: InputUnit, settings: DocumentSettings, text_field: str | None = None, source: str = ""
    ) -> None:
        self.sha256 = ""
        self.beyond = NOTHING_BEYOND
        self.num_rows: int | None = None
        self.languages = DocumentLanguages()
        self.unit = unit
        self._settings = settings
        self._fields = _fields(settings, text_field, source)
        self._rejects = Rejects(unit.url, settings, is_part=not unit.whole, begins_file=unit.start == 0)

    @property
    def dropped(self) -> Counter[str]:
        return self._rejects.dropped

    @property
    def place(self) -> str:
        """Where the last document begins, such as "line 7"."""
        return self._rejects.place

    def __iter__(self) -> Iterator[Document]:
        try:
            for document in self._documents():
                if has_too_many_marks(document.text):
                    self._rejects.too_many_marks()
                    continue
                if self._fields.language is not None:
                    self.languages.add(document.language)
                yield document
        except BadInput as error:
            if error.spoils_file and self._settings.on_bad_input == "skip":
                self._rejects.warn_spoiled(error)
            raise
        self._rejects.warn()

    def _documents(self) -> Iterator[Document]:
        ending, compression = file_format(self.unit.url)
        with storage.open_read(self.unit.url) as raw:
            head = read_bytes_of(raw, _HEAD_BYTES, self._rejects.where)
            if not head:
                self.sha256 = hashlib.sha256().hexdigest()
                return
            _check_ending(head, self._rejects.where, ending, compression)
            if ending != ".parquet":
                yield from self._text(raw, head, ending, compression)
            elif compression:
                yield from self._compressed_parquet(raw, head, compression)
            else:
                yield from self._parquet(raw)

    def _text(self, raw: BinaryIO, head: bytes, ending: str, compression: str) -> Iterator[Document]:
        hashed = _hashing(raw, self.unit, head)
        limit = self._settings.max_document_bytes
        part = Part(0, None) if self.unit.whole else Part(self.unit.start, self.unit.stop)
        try:
            stream = decompress(hashed, compression)
            if compression:
                head = stream.peek(_HEAD_BYTES)[:_HEAD_BYTES]
            _check_content(head, self._rejects.where, ending)
            if ending != ".txt":
                yield from json_lines(stream, part, limit, self._fields, self._rejects)
            elif self._settings.txt_documents == "blank_lines":
                yield from blocks_of_text(stream, part, limit, self._fields, self._rejects)
            else:
                yield from one_text(stream, limit, self._fields, self._rejects)
        except DAMAGE as error:
            place = f"at or before line {damaged_line(self.unit.url, compression)}"
            raise self._damaged(COMPRESSIONS[compression], place, error) from None
        self.sha256, self.beyond = hashed.hexdigest(), hashed.beyond()

    def _compressed_parquet(self, raw: BinaryIO, head: bytes, compression: str) -> Iterator[Document]:
        hashed = _hashing(raw, self.unit, head)
        with tempfile.TemporaryFile() as content:
            try:
                decompressed_copy(hashed, compression, content, self._rejects.where)
            except DAMAGE as error:
                place = f"after {content.tell():,} bytes of its content"
                raise self._damaged(COMPRESSIONS[compression], place, error) from None
            digest = hashed.hexdigest()
            content.seek(0)
            if head := content.read(_HEAD_BYTES):
                _check_ending(head, f"the content of {self._rejects.where}", ".parquet", "")
                yield from self._parquet(content)
        self.sha256 = digest

    def _parquet(self, file: BinaryIO) -> Iterator[Document]:
        try:
            rows = rows_of(file, self.unit)
            self.num_rows = rows.num_rows
            rows.hash_columns(self._fields.names)
            yield from parquet_rows(rows, self._settings.max_document_bytes, self._fields, self._rejects)
        except DamagedParquet as error:
            raise self._damaged("Parquet", f"in {error.place}", error) from None
        self.sha256 = rows.sha256()

    def _damaged(self, what: str, place: str, error: Exception) -> BadInput:
        advice = "fetch it again"
        if self._settings.on_bad_input == "error":
            advice += ", or leave it out with documents.on_bad_input=skip"
        message = f"{self._rejects.where} is damaged or cut short {place} ({what}: {error}); {advice}"
        return BadInput(message, "damaged file", spoils_file=True)


def _fields(settings: DocumentSettings, text_field: str | None, source: str = "") -> Fields:
    return Fields(
        text=text_field or settings.text_field,
        language=settings.language_field,
        id=settings.id_field,
        url=settings.url_field,
        metadata=settings.metadata_fields,
        source=source,
    )


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
    wanted = compression or (".parquet" if ending == ".parquet" else "")
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
