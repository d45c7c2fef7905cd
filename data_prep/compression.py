"""Reading compressed files as a stream, with every kind of damage told apart from an end."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import zlib
from typing import Any, BinaryIO

import zstandard

COMPRESSIONS = {".gz": "gzip", ".zst": "Zstandard", ".bz2": "bzip2", ".xz": "xz"}
_MAGIC = {
    ".gz": re.compile(rb"\x1f\x8b"),
    ".zst": re.compile(rb"\x28\xb5\x2f\xfd"),
    ".bz2": re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),
    ".xz": re.compile(rb"\xfd7zXZ\x00"),
}
DAMAGE = (EOFError, OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError)
_BUFFER_BYTES = 1 << 20
_ZSTANDARD_BYTES = 1 << 14  # read at a time: a piece may grow a thousandfold


def detect_compression(head: bytes) -> str:
    """The ending that belongs to a file that begins with these (at least ten) bytes, or ""."""
    return next((ending for ending, magic in _MAGIC.items() if magic.match(head)), "")


def decompress(file: io.RawIOBase, compression: str) -> BinaryIO:
    buffered = io.BufferedReader(file, _BUFFER_BYTES)
    if compression == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=buffered), _BUFFER_BYTES)  # type: ignore[arg-type]
    if compression == ".bz2":
        return io.BufferedReader(bz2.BZ2File(buffered), _BUFFER_BYTES)  # type: ignore[arg-type]
    if compression == ".xz":
        return io.BufferedReader(lzma.LZMAFile(buffered), _BUFFER_BYTES)  # type: ignore[arg-type]
    return io.BufferedReader(_ZstandardFile(buffered), _BUFFER_BYTES) if compression else buffered


class HashingFile(io.RawIOBase):
    """A file that hashes the bytes that are read from it."""

    def __init__(self, file: BinaryIO, digest: Any) -> None:
        self._file = file
        self._digest = digest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        self._digest.update(data)
        buffer[: len(data)] = data
        return len(data)

    def drain(self) -> None:
        """Hash what a decompressor did not ask for."""
        while data := self._file.read(_BUFFER_BYTES):
            self._digest.update(data)


class _ZstandardFile(io.RawIOBase):
    """Decompresses Zstandard frames, and unlike the library's own reader raises where the last one is cut short."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._frame: Any = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = (self._frame.unused_data if self._frame is not None and self._frame.eof else b"") or self._file.read(
                _ZSTANDARD_BYTES
            )
            if not data:
                if self._frame is not None and not self._frame.eof:
                    raise EOFError("the file ends within a frame")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._ready = memoryview(self._frame.decompress(data))
        piece, self._ready = self._ready[: len(buffer)], self._ready[len(buffer) :]
        buffer[: len(piece)] = piece
        return len(piece)
