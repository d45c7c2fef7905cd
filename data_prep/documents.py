"""Reading documents from input files as a stream: plain text and JSON lines, compressed or not.

A `.txt` file is one document. A `.jsonl` or `.json` file holds one JSON object a line, whose text field is a
document. Both may end in .gz, .zst, .bz2 or .xz as well. What cannot be read is a `BadInput`, which names the
file and line.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from data_prep import storage
from data_prep.compression import COMPRESSIONS, DAMAGE, HashingFile, decompress, detect_compression
from data_prep.config import DocumentSettings
from data_prep.errors import UsageError, UserError

_FORMATS = (".txt", ".jsonl", ".json")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class InputUnit:
    """A piece of work on the inputs: a whole file, or the lines of an uncompressed one that begin in a byte range."""

    url: str
    start: int
    stop: int
    whole: bool
    source: int


class BadInput(UserError):
    """Input that cannot be read; `reason` is the heading under which the policy `skip` counts it."""

    def __init__(self, message: str, reason: str = "unreadable", spoils_file: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.spoils_file = spoils_file

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.reason, self.spoils_file)


def file_format(url: str) -> tuple[str, str]:
    """Format and compression of a file by its name, such as (".jsonl", ".gz") or (".txt", "").

    Raises:
        UsageError: its ending is none that is read here.
    """
    name = url.lower()
    compression = next((ending for ending in COMPRESSIONS if name.endswith(ending)), "")
    for ending in _FORMATS:
        if name.removesuffix(compression).endswith(ending):
            return ending, compression
    raise UsageError(
        f"input {storage.redact(url)} has an ending that is not read here; "
        f"inputs end in {' '.join(_FORMATS)}, each also with {' '.join(COMPRESSIONS)} after it"
    )


def split_into_units(url: str, file_bytes: int, unit_bytes: int, source: int) -> list[InputUnit]:
    """The units of a file: parts of about `unit_bytes` of an uncompressed JSONL file, any other file whole."""
    parts = max(1, file_bytes // unit_bytes) if file_format(url) in ((".jsonl", ""), (".json", "")) else 1
    cuts = [file_bytes * part // parts for part in range(parts + 1)]
    return [InputUnit(url, start, stop, parts == 1, source) for start, stop in zip(cuts[:-1], cuts[1:], strict=True)]


class DocumentReader:
    """Iterates over the texts of a unit.

    When it is exhausted, `dropped` counts what the policy `skip` left out, by reason, and `sha256` is the
    digest of the bytes read: those of the file if the unit is a whole file, else those of the unit's lines.

    Raises:
        BadInput: input cannot be read and the policy is `error`; or, with either policy, a whole file turns
            out
            damaged after documents of it have been given out (`spoils_file`): the caller drops what it has of
            it.
    """

    def __init__(self, unit: InputUnit, settings: DocumentSettings) -> None:
        self.dropped: Counter[str] = Counter()
        self._unit = unit
        self._settings = settings
        self._digest = hashlib.sha256()
        self._where = storage.redact(unit.url)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def __iter__(self) -> Iterator[str]:
        ending, compression = file_format(self._unit.url)
        with storage.open_read(self._unit.url) as raw:
            if not _check_ending(raw, self._where, compression):
                return
            texts = self._one_text if ending == ".txt" else self._json_texts
            if self._unit.whole:
                hashed = HashingFile(raw, self._digest)
                yield from self._guarded(texts(decompress(hashed, compression)), compression)
                hashed.drain()
            else:
                yield from texts(self._at_first_line(raw))

    def _guarded(self, texts: Iterator[str], compression: str) -> Iterator[str]:
        try:
            yield from texts
        except DAMAGE as error:
            if not compression:
                raise UserError(f"{self._where} cannot be read: {error}; check the disk or the connection") from None
            raise BadInput(
                f"{self._where} is damaged or cut short ({COMPRESSIONS[compression]}: {error}); "
                "fetch it again, or leave it out with documents.on_bad_input=skip",
                "damaged file",
                spoils_file=True,
            ) from None

    def _at_first_line(self, raw: BinaryIO) -> BinaryIO:
        """The file at the first line that begins in the unit."""
        if self._unit.start:
            raw.seek(self._unit.start - 1)
            while (piece := raw.readline(_BUFFER_BYTES)) and not piece.endswith(b"\n"):
                pass
        return raw

    def _one_text(self, file: BinaryIO) -> Iterator[str]:
        limit = self._settings.max_document_bytes
        data = file.read(limit + 1)
        if len(data) > limit:
            self._bad(
                f"{self._where} is longer than documents.max_document_bytes={limit}, and a .txt file is one "
                "document; "
                "write its documents as JSON lines, or raise the limit",
                "too long",
            )
            return
        if b"\0" in data:
            self._bad(f"{self._where} is no text: byte {data.index(0)} is NUL; leave it out of the inputs", "binary")
            return
        text = self._decoded(data.removeprefix(_BYTE_ORDER_MARK), len(data) - len(data.removeprefix(_BYTE_ORDER_MARK)))
        if text is not None and text.strip():
            yield text

    def _json_texts(self, file: BinaryIO) -> Iterator[str]:
        limit = self._settings.max_document_bytes
        position = file.tell() if not self._unit.whole else 0
        line_number = 0
        while self._unit.whole or position < self._unit.stop:
            line = file.readline(limit + 1)
            if not line:
                return
            line_number += 1
            start = position
            position += self._count(line)
            if len(line) > limit and not line.endswith(b"\n"):
                while (piece := file.readline(_BUFFER_BYTES)) and not piece.endswith(b"\n"):
                    position += self._count(piece)
                position += self._count(piece)
                self._bad_line(
                    f"is longer than documents.max_document_bytes={limit}; raise the limit",
                    "too long",
                    start,
                    line_number,
                )
                continue
            if start == 0:
                line = line.removeprefix(_BYTE_ORDER_MARK)
            if line.strip():
                text = self._text_of(line, start, line_number)
                if text is not None:
                    yield text

    def _count(self, data: bytes) -> int:
        if not self._unit.whole:
            self._digest.update(data)
        return len(data)

    def _text_of(self, line: bytes, start: int, number: int) -> str | None:
        field = self._settings.text_field
        try:
            values = json.loads(line.decode())
        except UnicodeDecodeError as error:
            return self._bad_line(f"is not UTF-8 (byte {error.start} of the line)", "invalid UTF-8", start, number)
        except (ValueError, RecursionError) as error:
            return self._bad_line(f"is not JSON ({error})", "invalid JSON", start, number)
        if not isinstance(values, dict):
            return self._bad_line(
                f"holds {_kind(values)}, not an object with a field {field!r}", "no object", start, number
            )
        if field not in values:
            known = ", ".join(list(values)[:10]) or "none"
            return self._bad_line(
                f"has no field {field!r} (its fields: {known}); name the field with documents.text_field=NAME",
                "missing field",
                start,
                number,
            )
        if not isinstance(values[field], str):
            return self._bad_line(f"has {_kind(values[field])} for {field!r}, not text", "not text", start, number)
        return values[field]

    def _decoded(self, data: bytes, offset: int) -> str | None:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            self._bad(
                f"{self._where} is not UTF-8 at byte {offset + error.start}; convert it, such as with "
                "iconv, or leave it out",
                "invalid UTF-8",
            )
            return None

    def _bad_line(self, what: str, reason: str, start: int, number: int) -> None:
        if self._settings.on_bad_input == "error" and not self._unit.whole:
            number = _line_number(self._unit.url, start)
        remedy = "" if ";" in what else "; mend the line"
        self._bad(
            f"{self._where} line {number} {what}{remedy}, or leave such lines out with documents.on_bad_input=skip",
            reason,
        )

    def _bad(self, message: str, reason: str) -> None:
        if self._settings.on_bad_input == "error":
            raise BadInput(message, reason)
        self.dropped[reason] += 1


def _check_ending(raw: BinaryIO, where: str, compression: str) -> bool:
    """Refuse a file whose first bytes are not what its ending says; False where it is empty."""
    head = raw.read(10)
    raw.seek(0)
    found = detect_compression(head)
    if found != compression and head:
        is_now = f"is {COMPRESSIONS[found]}-compressed" if found else f"is not {COMPRESSIONS[compression]}-compressed"
        remedy = f"rename it to end in {found}" if found else f"rename it without {compression}, or fetch it again"
        raise BadInput(f"{where} {is_now}, other than its ending says; {remedy}", "wrong ending", spoils_file=True)
    return bool(head)


def _line_number(url: str, position: int) -> int:
    """Number of the line that begins at a byte position."""
    number = 1
    with storage.open_read(url) as file:
        while position > 0 and (piece := file.read(min(_BUFFER_BYTES, position))):
            number += piece.count(b"\n")
            position -= len(piece)
    return number


def _kind(value: Any) -> str:
    names = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), "null")
