"""Streams of compressed files that report every kind of damage instead of ending early."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Protocol

import zstandard

from data_prep.base.errors import UserError

COMPRESSIONS = {".gz": "gzip", ".zst": "Zstandard", ".bz2": "bzip2", ".xz": "xz"}
_MAGIC = {
    ".gz": re.compile(rb"\x1f\x8b"),
    ".zst": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),  # a frame, or a skippable one as of pzstd
    ".bz2": re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),
    ".xz": re.compile(rb"\xfd7zXZ\x00"),
}
_UNSUPPORTED = {
    "a ZIP archive": re.compile(rb"PK(\x03\x04|\x05\x06)"),
    "a tar archive": re.compile(rb"(?s).{257}ustar(\x0000|  \0)"),
    "a 7z archive": re.compile(rb"7z\xbc\xaf\x27\x1c"),
    "a RAR archive": re.compile(rb"Rar!\x1a\x07"),
    "LZ4-compressed": re.compile(rb"\x04\x22\x4d\x18|\x02\x21\x4c\x18"),
    "Snappy-compressed": re.compile(rb"\xff\x06\0\0sNaPpY"),
    "lzip-compressed": re.compile(rb"LZIP\x01"),
    "compressed by `compress`": re.compile(rb"\x1f[\x9d\xa0]"),
}
DAMAGE = (EOFError, OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError)
_BUFFER_BYTES = 1 << 20
_PIECE_BYTES = 1 << 16
# Input per call of the decoder, which returns all output at once; a repeated byte grows 32,768-fold: 32 MB at most.
_ZSTANDARD_BYTES = 1 << 10
_LONGEST_WINDOW_BYTES = 1 << 31  # of zstd --long=31; the system allocates no more than the content fills


def detect_compression(head: bytes) -> str:
    """Return the extension for a file that begins with these (at least ten) bytes, or ""."""
    return next((ending for ending, magic in _MAGIC.items() if magic.match(head)), "")


def unsupported_container(head: bytes) -> str:
    """Return what holds the files that begin with these bytes, such as "a ZIP archive", if it is not read; or ""."""
    return next((name for name, magic in _UNSUPPORTED.items() if magic.match(head)), "")


def decompress(file: io.RawIOBase, compression: str) -> io.BufferedReader:
    """Return the content of `file`, buffered; `compression` is one of `COMPRESSIONS`, or "" for none.

    The stream's methods raise one of `DAMAGE` if the file is damaged or truncated.
    """
    buffered: io.BufferedReader = io.BufferedReader(file, _BUFFER_BYTES)
    if not compression:
        return buffered
    return io.BufferedReader(_decompressor(buffered, compression), _BUFFER_BYTES)


def _decompressor(file: BinaryIO, compression: str) -> Any:
    return gzip.GzipFile(fileobj=file) if compression == ".gz" else _FrameReader(file, *_DECODERS[compression])


def undamaged_pieces(file: io.RawIOBase, compression: str) -> Iterator[bytes]:
    """Yield the content of a file up to its first damage."""
    decompressor = _decompressor(io.BufferedReader(file, _BUFFER_BYTES), compression)
    with contextlib.suppress(*DAMAGE):
        while piece := (decompressor.read1 if compression == ".gz" else decompressor.read)(_PIECE_BYTES):
            yield piece


def decompressed_copy(file: io.RawIOBase, compression: str, copy: BinaryIO, where: str) -> None:
    """Write the content of `file` to `copy`, for formats whose index is at the end."""
    stream = decompress(file, compression)
    while piece := stream.read(_BUFFER_BYTES):
        try:
            copy.write(piece)
            copy.flush()
        except OSError as error:
            raise UserError(
                f"{where} cannot be decompressed: {error.strerror or error} in {tempfile.gettempdir()}, which holds "
                "its content while it is read",
                fix="free space there or set TMPDIR to another folder, and rerun the same command",
                code="temporary-folder-full",
            ) from None


class _Decoder(Protocol):
    """Decoder of one frame (Zstandard's word; bzip2 and xz say stream)."""

    eof: bool
    needs_input: bool
    unused_data: bytes

    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _ZstandardDecoder:
    """The library's decoder of a frame with the methods of the standard library's."""

    needs_input = True

    def __init__(self) -> None:
        self._decoder = zstandard.ZstdDecompressor(max_window_size=_LONGEST_WINDOW_BYTES).decompressobj()

    @property
    def eof(self) -> bool:
        return self._decoder.eof

    @property
    def unused_data(self) -> bytes:
        return self._decoder.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._decoder.decompress(data)


_DECODERS: dict[str, tuple[Callable[[], Any], int, bytes]] = {
    ".zst": (_ZstandardDecoder, _ZSTANDARD_BYTES, b""),
    ".bz2": (bz2.BZ2Decompressor, _PIECE_BYTES, b""),
    ".xz": (lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), _PIECE_BYTES, b"\0"),
}
# For each: a frame decoder, input bytes per call, padding allowed between frames.


class _FrameReader(io.RawIOBase):
    """Decompress frame after frame.

    Unlike the libraries' own files it raises if the last Zstandard frame is truncated or if the bytes after a bzip2
    or xz stream are damaged, which the libraries read as the end.
    """

    def __init__(self, file: BinaryIO, new_decoder: Callable[[], _Decoder], piece_bytes: int, padding: bytes) -> None:
        self._file = file
        self._new_decoder = new_decoder
        self._piece_bytes = piece_bytes
        self._padding = padding
        self._decoder: _Decoder | None = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if self._decoder is None or self._decoder.eof:
                data = self._frame_start(b"" if self._decoder is None else self._decoder.unused_data)
                if not data:
                    return 0
                self._decoder = self._new_decoder()
            elif self._decoder.needs_input:
                data = self._file.read(self._piece_bytes)
                if not data:
                    raise EOFError("the file ends within a compressed frame")
            else:
                data = b""
            try:
                self._ready = memoryview(self._decoder.decompress(data, _BUFFER_BYTES))
            except MemoryError:  # an xz stream's header may ask for 4 GB
                raise OSError("its header requests more memory than available") from None
        piece, self._ready = self._ready[: len(buffer)], self._ready[len(buffer) :]
        buffer[: len(piece)] = piece
        return len(piece)

    def _frame_start(self, data: bytes) -> bytes:
        """Return the first bytes of the next frame (`data` is already read); empty at the end of the file."""
        while not (data := data.lstrip(self._padding) if self._padding else data):
            data = self._file.read(self._piece_bytes)
            if not data:
                return b""
        return data
