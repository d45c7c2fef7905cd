"""Files of unfinished work, which may stay on a disk for weeks, so everything read of them is checked.

A parts file is a grid of parts, each with an entry in an index, so that a part, or a run of parts of a row, is read
without the others. It is written front to back:

    parts, row after row | index: offset, bytes and checksum of each part | table: JSON | trailer

A state file holds JSON values. Reading raises `UserError` where a checksum does not match.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

import xxhash

from data_prep.base.errors import UserError
from data_prep.storage import storage

_CHECKSUM_BYTES = 8
_TRAILER = struct.Struct("<8sQQQQ")  # kind, rows, columns, offset of the index, bytes of the table
_ENTRY = struct.Struct("<QQQ")  # of the index, a `_Part`
_ENTRY_BYTES = _ENTRY.size + _CHECKSUM_BYTES  # each has a checksum of its own, since each is read alone
_COPY_BYTES = 1 << 22


class PartsWriter:
    """Writer of a parts file.

    Args:
        file: at its beginning.
        kind: eight bytes that name what the parts are, and the version of their layout.
        num_columns: parts of each row.
    """

    def __init__(self, file: BinaryIO, kind: bytes, num_columns: int) -> None:
        self._file, self._kind, self._num_columns = file, kind, num_columns
        self._index = bytearray()

    @contextlib.contextmanager
    def part(self) -> Iterator[Callable[[bytes], None]]:
        """Yield the function that writes the next part, piece by piece."""
        offset, hasher = self._file.tell(), xxhash.xxh3_64()

        def write(data: bytes) -> None:
            self._file.write(data)
            hasher.update(data)

        yield write
        self._add_entry(_Part(offset, self._file.tell() - offset, hasher.intdigest()))

    def add(self, data: bytes) -> None:
        """Write the next part."""
        self._add_entry(_Part(self._file.tell(), len(data), xxhash.xxh3_64_intdigest(data)))
        self._file.write(data)

    def append(self, other: PartsFile) -> None:
        """Write the parts of a file of the same kind and number of columns; they are checked once they are read."""
        shift = self._file.tell()
        other.copy_parts(self._file)
        for row in range(other.num_rows):
            for offset, num_bytes, checksum in other.entries(row, 0, self._num_columns):
                self._add_entry(_Part(shift + offset, num_bytes, checksum))

    def close(self, table: Any) -> None:
        """Write the index and the table, JSON values that describe the parts; the last row is complete."""
        num_rows, rest = divmod(len(self._index), _ENTRY_BYTES * self._num_columns)
        assert not rest
        offset, data = self._file.tell(), json.dumps(table).encode()
        self._file.write(self._index)
        self._file.write(sealed(data))
        self._file.write(sealed(_TRAILER.pack(self._kind, num_rows, self._num_columns, offset, len(data))))

    def _add_entry(self, part: _Part) -> None:
        self._index += sealed(_ENTRY.pack(*part))


class PartsFile:
    """An open parts file.

    Attributes:
        num_rows, num_columns: of the grid of parts.
    """

    def __init__(self, file: BinaryIO, url: str, kind: bytes) -> None:
        """Read the trailer."""
        self._file, self._url = file, url
        offset = file.seek(0, 2) - _TRAILER.size - _CHECKSUM_BYTES
        trailer = _TRAILER.unpack(_read_sealed(file, url, max(0, offset), _TRAILER.size))
        found, self.num_rows, self.num_columns, self._index_offset, self._table_bytes = trailer
        if found != kind:
            raise damaged(url)

    def table(self) -> Any:
        """Read the JSON values that describe the parts."""
        offset = self._index_offset + self.num_rows * self.num_columns * _ENTRY_BYTES
        return json.loads(bytes(_read_sealed(self._file, self._url, offset, self._table_bytes)))

    def read(self, row: int, first: int, stop: int | None = None) -> memoryview:
        """Read a part of a row, or the parts from `first` to before `stop`, one after the other."""
        parts = self.entries(row, first, first + 1 if stop is None else stop)
        num_bytes = sum(part.num_bytes for part in parts)
        data = memoryview(self.read_unchecked(parts[0].offset, num_bytes) if num_bytes else b"")
        if len(data) != num_bytes:
            raise damaged(self._url)
        position = 0
        for part in parts:
            if xxhash.xxh3_64_intdigest(data[position : position + part.num_bytes]) != part.checksum:
                raise damaged(self._url)
            position += part.num_bytes
        return data

    def entries(self, row: int, first: int, stop: int) -> list[_Part]:
        """Read where the parts of a row from `first` to before `stop` are."""
        self._file.seek(self._index_offset + (row * self.num_columns + first) * _ENTRY_BYTES)
        data = memoryview(self._file.read((stop - first) * _ENTRY_BYTES))
        starts = range(0, (stop - first) * _ENTRY_BYTES, _ENTRY_BYTES)
        return [_Part(*_ENTRY.unpack(unsealed(data[start : start + _ENTRY_BYTES], self._url))) for start in starts]

    def read_unchecked(self, offset: int, num_bytes: int) -> bytes:
        """Read bytes of a part that the caller checks, from an offset in the file."""
        self._file.seek(offset)
        return self._file.read(num_bytes)

    def copy_parts(self, target: BinaryIO) -> None:
        """Write the bytes of all parts to another file."""
        self._file.seek(0)
        left = self._index_offset
        while left:
            if not (data := self._file.read(min(left, _COPY_BYTES))):
                raise damaged(self._url)
            target.write(data)
            left -= len(data)


class _Part(NamedTuple):
    """Where a part is in the file, and the xxh3_64 of its bytes."""

    offset: int
    num_bytes: int
    checksum: int


@contextlib.contextmanager
def open_parts(url: str, kind: bytes) -> Iterator[PartsFile]:
    """Open a parts file for reading."""
    with storage.open_read(url) as file:
        yield PartsFile(file, url, kind)


def sealed(part: bytes) -> bytes:
    """Return bytes followed by their checksum."""
    return part + xxhash.xxh3_64_digest(part)


def unsealed(data: bytes | memoryview, url: str) -> memoryview:
    """Return the bytes that `sealed` was given."""
    part, checksum = memoryview(data)[:-_CHECKSUM_BYTES], memoryview(data)[-_CHECKSUM_BYTES:]
    if xxhash.xxh3_64_digest(part) != checksum:
        raise damaged(url)
    return part


def damaged(url: str) -> UserError:
    """Return the error for a work file whose checksum does not match."""
    return UserError(
        f"{storage.redact(url)} is damaged, or was written by an earlier release",
        fix="rerun the same command with --fresh",
        code="damaged-work-file",
    )


def write_state(url: str, values: Any) -> None:
    """Write JSON values atomically."""
    storage.write_bytes(url, json.dumps({"xxh3_64": _checksum(values), "values": values}).encode())


def read_state(url: str) -> Any:
    """Return the values as written."""
    try:
        stored = json.loads(storage.read_bytes(url))
    except (ValueError, RecursionError):
        stored = None
    if not isinstance(stored, dict) or stored.get("xxh3_64") != _checksum(stored.get("values")):
        raise damaged(url)
    return stored["values"]


def _checksum(values: Any) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(values).encode())


def _read_sealed(file: BinaryIO, url: str, offset: int, num_bytes: int) -> memoryview:
    file.seek(offset)
    data = file.read(num_bytes + _CHECKSUM_BYTES)
    if len(data) != num_bytes + _CHECKSUM_BYTES:
        raise damaged(url)
    return unsealed(data, url)
