"""Streaming readers of documents from input files of any format.

The format is that which the source names, or follows from the file ending, before .gz, .zst, .bz2 or .xz if the file is
compressed. Unreadable input raises `BadInput`, which names the file and the line, row or byte.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, cast

from data_prep.base import progress
from data_prep.config.preparation_config import DocumentSettings
from data_prep.documents.document import Document
from data_prep.documents.drops import READING, Drop, of_step
from data_prep.documents.formats.format_registry import BUILT_IN, Formats, read_documents
from data_prep.documents.formats.input_format import Fields, Format, Part, Reading
from data_prep.documents.input_files import InputUnit
from data_prep.documents.lines import damaged_line
from data_prep.documents.rejects import BadInput, Rejects
from data_prep.storage import storage
from data_prep.storage.compression import (
    COMPRESSIONS,
    DAMAGE,
    decompress,
    decompressed_copy,
    detect_compression,
    unsupported_container,
)
from data_prep.storage.hashing_files import HashingFile, RangeHashingFile, read_bytes_of
from data_prep.storage.parquet import DamagedTable
from data_prep.text.cleaning import has_too_many_marks
from data_prep.text.sentences import known_language

_HEAD_BYTES = 1 << 10
_REPORT_SECONDS = 1.0
_SHOWN_CHARACTERS = 40


def unit_sha256(unit: InputUnit, settings: DocumentSettings, formats: Formats) -> str:
    """Compute `DocumentReader.sha256` of a unit without decoding its documents, which may be damaged."""
    item = formats[unit.format.ending]
    with storage.open_read(unit.url) as raw:
        if unit.format.compression or not item.needs_seeking:
            return _hashing(raw, unit, b"").hexdigest()
        file = RangeHashingFile(raw, storage.redact(unit.url))
        try:
            file.hash_ranges(item.outline(file, _part_of(unit), Fields.of(settings)).ranges)
        except DamagedTable:
            return storage.sha256_of(unit.url)
        return file.hexdigest()


class DocumentReader:
    """Iterator over the documents of a unit; the settings are those of its source.

    Attributes:
        is_one_document: whether the whole file is one document.
        rejects: what reading left out, and the position of the last document.
        filtered: number of documents that a `FilterChain` leaves out.
        languages: counts of the languages that documents name, where the settings have a field for it.
        sha256: digest of what was read, at the end: of a whole or compressed file its bytes, of a part of a text file
            the bytes of its range, of a format with an outline, such as Parquet, the ranges of that.
        num_rows: of the part, once reading begins; None where the format's outline does not state it.
        bytes_read: how far the file was read, for a unit that is a whole file.

    Raises:
        BadInput: input cannot be read and the policy is `error`; or, with either policy, the file is damaged or of
            another type (`spoils_file`), which may show after documents of it were yielded: the caller drops what it
            has of the unit.
        UserError: the disk or the connection fails.
    """

    def __init__(self, unit: InputUnit, settings: DocumentSettings, formats: Formats, source: str = "") -> None:
        self.sha256 = ""
        self.num_rows: int | None = None
        self.bytes_read = 0
        self.filtered: Counter[Drop] = Counter()
        self.languages = DocumentLanguages()
        self.is_quiet = False
        self.unit = unit
        self._raw: BinaryIO | None = None
        self._settings = settings
        self._format = formats[unit.format.ending]
        self.is_one_document = self._format.is_one_document(settings)
        self._fields = Fields.of(settings, source)
        own_format = unit.format.ending if self._format.path else ""
        self.rejects = Rejects(
            unit.url, settings, is_part=not unit.whole, begins_file=unit.start == 0, own_format=own_format
        )

    @property
    def dropped(self) -> Counter[str]:
        """Number of documents that reading left out, by reason; complete at the end, when it is logged as a warning."""
        return self.rejects.dropped

    @property
    def drops(self) -> Counter[Drop]:
        """Number of all documents that reading and filters left out."""
        return of_step(READING, self.rejects.dropped) + self.filtered

    def __iter__(self) -> Iterator[Document]:
        num_documents, num_reported, reported_at = 0, 0, time.monotonic()
        has_more = len(self._fields.names) > 1 + (self._fields.language is not None)
        try:
            for document in self._documents():
                if has_too_many_marks(document.text):
                    self.rejects.too_many_marks()
                    continue
                if self._fields.language is not None:
                    self.languages.add(document.language)
                if has_more:
                    self.languages.add_absent(self._absent(document))
                yield document
                num_documents += 1
                if (now := time.monotonic()) - reported_at >= _REPORT_SECONDS:
                    reached = self._reached(num_documents)
                    progress.report(max(0, reached - num_reported))
                    num_reported, reported_at = max(reached, num_reported), now
        except BadInput as error:
            error.reason = self.rejects.named(error.reason)
            if error.spoils_file and self._settings.on_bad_input == "skip":
                self.rejects.warn_spoiled(error)
            raise
        if not self.is_quiet:
            self.rejects.warn()

    def _reached(self, num_documents: int) -> int:
        """Return how many of the unit's bytes are read, about, when it has yielded so many documents."""
        if self.num_rows is not None:
            return self.unit.bytes * num_documents // max(self.num_rows, num_documents)
        position = self.rejects.number
        if position is None or self.unit.format.compression:
            position = self.unit.start
            with contextlib.suppress(AttributeError, OSError, ValueError):  # not every store has a position
                position = cast(BinaryIO, self._raw).tell()
        return min(max(0, position - self.unit.start), self.unit.bytes)

    def _absent(self, document: Document) -> Iterator[str]:
        """Yield the names of the fields without a value in the document."""
        if self._fields.id is not None and document.id is None:
            yield self._fields.id
        if self._fields.url is not None and document.url is None:
            yield self._fields.url
        yield from (name for name in self._fields.metadata if name not in document.metadata)

    def _documents(self) -> Iterator[Document]:
        compression = self.unit.format.compression
        with storage.open_read(self.unit.url) as raw:
            self._raw = raw
            head = read_bytes_of(raw, _HEAD_BYTES, self.rejects.where)
            if not head:
                self.sha256 = hashlib.sha256().hexdigest()
                return
            self._check_ending(head, self.rejects.where, compression)
            try:
                if not self._format.needs_seeking:
                    yield from self._stream(raw, head, compression)
                elif compression:
                    yield from self._unpacked(raw, head, compression)
                else:
                    yield from self._seeking(raw)
            except DamagedTable as error:
                raise self._damaged(f"in {error.place}", error) from None
            finally:
                with contextlib.suppress(AttributeError, OSError, ValueError):  # not every store has a position
                    self.bytes_read = raw.tell()

    def _stream(self, raw: BinaryIO, head: bytes, compression: str) -> Iterator[Document]:
        hashed = _hashing(raw, self.unit, head)
        try:
            stream = decompress(hashed, compression)
            if compression:
                head = stream.peek(_HEAD_BYTES)[:_HEAD_BYTES]
                _check_container(head, f"the content of {self.rejects.where}", self._format)
            self._format.check_content(head, self.rejects.where)
            yield from read_documents(self._format, stream, self._reading())
        except DAMAGE as error:
            place = f"at or before line {damaged_line(self.unit.url, compression)}"
            raise self._damaged(place, error, COMPRESSIONS[compression]) from None
        self.sha256 = hashed.hexdigest()

    def _reading(self) -> Reading:
        return Reading(_part_of(self.unit), self._settings, self._fields, self.rejects)

    def _unpacked(self, raw: BinaryIO, head: bytes, compression: str) -> Iterator[Document]:
        hashed = _hashing(raw, self.unit, head)
        with tempfile.TemporaryFile() as content:
            try:
                decompressed_copy(hashed, compression, content, self.rejects.where)
            except DAMAGE as error:
                place = f"after {content.tell():,} bytes of its content"
                raise self._damaged(place, error, COMPRESSIONS[compression]) from None
            digest = hashed.hexdigest()
            content.seek(0)
            if head := content.read(_HEAD_BYTES):
                self._check_ending(head, f"the content of {self.rejects.where}", "")
                yield from self._seeking(content)
        self.sha256 = digest

    def _seeking(self, raw: BinaryIO) -> Iterator[Document]:
        file = RangeHashingFile(raw, self.rejects.where)
        reading = self._reading()
        outline = self._format.outline(file, reading.part, self._fields)
        self.num_rows = outline.num_rows
        file.hash_ranges(outline.ranges)
        yield from read_documents(self._format, cast(BinaryIO, file), reading)
        self.sha256 = file.hexdigest()

    def _check_ending(self, head: bytes, where: str, compression: str) -> None:
        """Raise if the first bytes of a file contradict its ending, or the format that its source names."""
        item, ending, named = self._format, self.unit.format.ending, self.unit.format.named
        _check_container(head, where, item)
        found_format = next((each for each in BUILT_IN if each.matches(head)), None)
        wanted = compression or (ending if item.kind else "")
        found = detect_compression(head) or ("" if found_format is None else found_format.endings[0])
        if found == wanted or (not compression and found_format is item):
            return
        names = {ending: f"{name}-compressed" for ending, name in COMPRESSIONS.items()}
        names |= {ending: each.kind for each in (item, found_format) if each is not None for ending in each.endings}
        is_now = f"is {names[found]}" if found else f"is not {names[wanted]}"
        what, fix = "its extension", f"rename it to end in {found}" if found else f"rename it without {wanted}"
        if named and ":" not in named and not (compression and self.unit.url.lower().endswith(compression)):
            right = f"{ending}{found}" if found in COMPRESSIONS else found
            what = f"the format {named!r} of its source"
            fix = f"name the format {right.lstrip('.') or 'that it has'} (sources[].format, --input-format)"
        raise BadInput(
            f"{where} {is_now}, which contradicts {what}",
            "wrong ending",
            spoils_file=True,
            fix=fix if found else f"{fix}, or fetch it again",
        )

    def _damaged(self, place: str, error: Exception, compression: str = "") -> BadInput:
        skip = ", or leave it out with documents.on_bad_input=skip" if self._settings.on_bad_input == "error" else ""
        return BadInput(
            f"{self.rejects.where} is damaged or cut short {place} ({compression and f'{compression}: '}{error})",
            "damaged file",
            spoils_file=True,
            fix=f"fetch it again{skip}",
        )


def _part_of(unit: InputUnit) -> Part:
    return Part(unit.start, None if unit.whole else unit.stop)


def _hashing(raw: BinaryIO, unit: InputUnit, head: bytes) -> HashingFile:
    """Return the file from the byte before the unit's range, which shows whether a line begins with the range.

    `head` contains the bytes already read: some servers cannot seek back to the beginning.
    """
    where = storage.redact(unit.url)
    if not unit.start:
        return HashingFile(raw, where, None if unit.whole else unit.stop, head)
    raw.seek(unit.start - 1)
    return HashingFile(raw, where, unit.stop - unit.start + 1)


def _check_container(head: bytes, where: str, item: Format) -> None:
    """Raise if a file is an archive, or compressed in an unsupported way; a user's own format may read it."""
    if not item.path and (found := unsupported_container(head)):
        raise BadInput(
            f"{where} is {found}, which is not supported",
            "wrong ending",
            spoils_file=True,
            fix=f"unpack it; compressed files may be {', '.join(COMPRESSIONS.values())}",
        )


@dataclass
class DocumentLanguages:
    """Counts of documents whose language was looked up.

    Attributes:
        unnamed: number of documents without a language.
        unknown: number of documents with an unknown language; `first_unknown` is the first such name.
        read: number of all documents.
        absent: number of documents without a value, by field (id, URL and metadata).
    """

    documents: int = 0
    unnamed: int = 0
    unknown: int = 0
    first_unknown: str = ""
    read: int = 0
    absent: dict[str, int] = field(default_factory=dict)

    def add(self, language: str | None) -> None:
        """Count a document of this language."""
        self.documents += 1
        if language is None:
            self.unnamed += 1
        elif not known_language(language, ""):
            self.unknown += 1
            self.first_unknown = self.first_unknown or language[:_SHOWN_CHARACTERS]

    def add_absent(self, names: Iterable[str]) -> None:
        """Count a document that has no value in these fields."""
        self.read += 1
        for name in names:
            self.absent[name] = self.absent.get(name, 0) + 1

    def merge(self, other: DocumentLanguages) -> None:
        self.documents += other.documents
        self.unnamed += other.unnamed
        self.unknown += other.unknown
        self.first_unknown = self.first_unknown or other.first_unknown
        self.read += other.read
        for name, count in other.absent.items():
            self.absent[name] = self.absent.get(name, 0) + count

    def absent_warnings(self) -> Iterator[str]:
        """Yield warnings about fields in which no document has a value."""
        for name, count in sorted(self.absent.items()):
            if count == self.read:
                yield f"none of its {self.read:,} documents has a value in the field {name!r}"

    def warnings(self, field: str) -> Iterator[str]:
        """Yield warnings: no document has a language in the field, or some have an unknown one."""
        if 0 < self.documents == self.unnamed:
            yield f"none of its {self.documents:,} documents names a language in the field {field!r}"
        if self.unknown:
            yield (
                f"{self.unknown:,} of its documents name a language in the field {field!r} that is unknown (such as "
                f"{self.first_unknown!r}; give codes such as en, de or zh)"
            )
