"""Files that hash the bytes read from them, so that a digest of the inputs needs no second read."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from typing import Any, BinaryIO

from data_prep.base.errors import UserError

_PIECE_BYTES = 1 << 20


def read_bytes_of(file: BinaryIO, num_bytes: int, where: str) -> bytes:
    """Read up to `num_bytes` of an input; an error of the disk or network is not damage of its content."""
    try:
        return file.read(num_bytes)
    except OSError as error:
        raise UserError(
            f"{where} cannot be read: {error}", fix="check the disk or the connection", code="unreadable-file"
        ) from None


class HashingFile(io.RawIOBase):
    """A file that hashes the first `num_bytes` that are read from its position on, or all bytes without a number.

    `head` holds the bytes that were read before; they come first. Bytes beyond `num_bytes`, such as the end of the last
    line, are read and not hashed.
    """

    def __init__(self, file: BinaryIO, where: str, num_bytes: int | None = None, head: bytes = b"") -> None:
        self._file = file
        self._where = where
        self._left = num_bytes
        self._digest = hashlib.sha256()
        self._head = head

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._next(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def hexdigest(self) -> str:
        """Read what is left, and return the sha256."""
        while self._left != 0 and self._next(_PIECE_BYTES):
            pass
        return self._digest.hexdigest()

    def _next(self, num_bytes: int) -> bytes:
        if self._head:
            data, self._head = self._head[:num_bytes], self._head[num_bytes:]
        else:
            data = read_bytes_of(self._file, num_bytes, self._where)
        if self._left is None:
            self._digest.update(data)
        else:
            inside = min(len(data), self._left)
            self._digest.update(memoryview(data)[:inside])
            self._left -= inside
        return data


class RangeHashingFile(io.RawIOBase):
    """A seekable file that hashes byte ranges; each is hashed in order, however the reads of several alternate."""

    def __init__(self, file: BinaryIO, where: str) -> None:
        self._file = file
        self._where = where
        self._ranges: list[_Range] = []

    def hash_ranges(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Hash what is read from now on of these ranges (start, stop), which do not overlap."""
        self._ranges = [_Range(start, stop) for start, stop in ranges]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def read(self, size: int = -1) -> bytes:
        position = self._file.tell()
        data = read_bytes_of(self._file, size, self._where)
        for hashed in self._ranges:
            hashed.update(data, position)
        return data

    def hexdigest(self) -> str:
        """Read what is left of the ranges, and return the sha256 of their sha256."""
        for hashed in self._ranges:
            self._file.seek(hashed.position)
            while hashed.position < hashed.stop:
                data = read_bytes_of(self._file, min(_PIECE_BYTES, hashed.stop - hashed.position), self._where)
                if not data:
                    break
                hashed.update(data, hashed.position)
        return hashlib.sha256(b"".join(hashed.digest.digest() for hashed in self._ranges)).hexdigest()


class _Range:
    """The part of a file from `position`, up to which it is hashed, to `stop`."""

    def __init__(self, start: int, stop: int) -> None:
        self.position, self.stop = start, stop
        self.digest = hashlib.sha256()

    def update(self, data: bytes, start: int) -> None:
        """Hash the part of `data`, the bytes from `start` on, that continues what is hashed already."""
        if start <= self.position < min(start + len(data), self.stop):
            piece = memoryview(data)[self.position - start : self.stop - start]
            self.digest.update(piece)
            self.position += len(piece)
