"""Tars made to do harm, each under the name of its harm."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_DTYPES = {
    "document_ids": np.uint64,
    "documents": np.uint32,
    "sentences": np.uint32,
    "sources": np.uint16,
    "tokens": np.uint16,
}
_NAME = "000000-00000.tokens.npy"
AT_THE_ROOT = Path("/x.tokens.npy")
"""Where the tar of an absolute name would write."""
TRACE = "ran"
"""The file beside the tar that its pickles write."""
BOMB_BYTES = 1 << 28  # far beyond the pieces of 32 MiB that a reader holds, one or two of them as threads have it


class Payload:
    """A pickle that writes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.write_text, (self.path, "run")


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def with_header(text: str, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + data


def whole_record(key: str = "000000-00000") -> list[tuple[str, bytes]]:
    return [(f"{key}.{field}.npy", npy(np.zeros(1, dtype))) for field, dtype in _DTYPES.items()]


def members(path: Path, *pairs: tuple[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in pairs:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def of_type(kind: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        info = tarfile.TarInfo(_NAME)
        info.type, info.linkname = kind, "/etc/passwd"
        with tarfile.open(path, "w") as tar:
            tar.addfile(info)

    return write


def with_pax_headers(data: bytes = npy(np.arange(5, 9, dtype=np.uint16)), **headers: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        info = tarfile.TarInfo(_NAME)
        info.size = len(data)
        info.pax_headers = {name.replace("_", "."): value for name, value in headers.items()}
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
            tar.addfile(info, io.BytesIO(data))

    return write


def header_alone(kind: bytes, data: bytes = b"", size: int | None = None) -> Callable[[Path], None]:
    """A member of this kind that says it has `size` bytes, whatever it has."""

    def write(path: Path) -> None:
        info = tarfile.TarInfo(_NAME)
        info.type, info.size = kind, len(data) if size is None else size
        path.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + data + bytes(10240))

    return write


def pickled(path: Path) -> None:
    members(path, ("000000-00000.tokens.pyd", pickle.dumps(Payload(path.with_name(TRACE)))))


def objects(path: Path) -> None:
    """An array that numpy unpickles where it is allowed to."""
    array = np.empty(1, dtype=object)
    array[0] = Payload(path.with_name(TRACE))
    members(path, (_NAME, npy(array)))


def sparse(path: Path) -> None:
    """An old GNU sparse member: 512 bytes in the tar that read as `BOMB_BYTES`."""
    info = tarfile.TarInfo(_NAME)
    info.size, info.type = 512, tarfile.GNUTYPE_SPARSE
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[386:398], header[398:410] = b"%011o " % 0, b"%011o " % 512
    header[483:495] = b"%011o " % BOMB_BYTES
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    path.write_bytes(bytes(header) + npy(np.arange(5, 9, dtype=np.uint16)).ljust(512, b"\0") + bytes(10240))


def shape(text: str, data: bytes = b"ab") -> Callable[[Path], None]:
    header = f"{{'descr': '<u2', 'fortran_order': False, 'shape': {text}, }}\n"
    return lambda path: members(path, (_NAME, with_header(header, data)))


HOSTILE: dict[str, Callable[[Path], None]] = {
    "hard link": of_type(tarfile.LNKTYPE),
    "symbolic link": of_type(tarfile.SYMTYPE),
    "character device": of_type(tarfile.CHRTYPE),
    "block device": of_type(tarfile.BLKTYPE),
    "pipe": of_type(tarfile.FIFOTYPE),
    "folder": of_type(tarfile.DIRTYPE),
    "name with dots": lambda path: members(path, ("../../x.tokens.npy", npy(np.arange(5, 9, dtype=np.uint16)))),
    "absolute name": lambda path: members(path, (str(AT_THE_ROOT), npy(np.arange(5, 9, dtype=np.uint16)))),
    "backslashes": lambda path: members(path, ("a\\..\\x.tokens.npy", b"")),
    "pickle": pickled,
    "objects": objects,
    "fields": lambda path: members(path, (_NAME, npy(np.zeros(1, [("a", "<u2")])))),
    "type that is none": lambda path: members(
        path, (_NAME, with_header("{'descr': '<z9', 'fortran_order': False, 'shape': (1,), }\n", bytes(9)))
    ),
    "huge shape": shape("(99999999999999999999999,)"),
    "negative shape": shape("(-1,)"),
    "two dimensions": shape("(1, 1)"),
    "interleaved keys": lambda path: members(path, whole_record()[0], *whole_record("000000-00001")),
    "keys out of order": lambda path: members(path, *whole_record("000000-00001"), *whole_record()),
    "sparse bomb": sparse,
    "pax sparse bomb": with_pax_headers(
        b"1\n0\n512\n".ljust(512, b"\0") + bytes(512),
        GNU_sparse_major="1",
        GNU_sparse_minor="0",
        GNU_sparse_realsize=str(BOMB_BYTES),
    ),
    "size of a terabyte": with_pax_headers(size=str(1 << 40)),
    "pax headers that are no numbers": with_pax_headers(GNU_sparse_map="a,b"),
    "pax header of an endless length": header_alone(tarfile.XHDTYPE, b"99999999999999999999 a=b\n"),
    "pax headers of a terabyte": header_alone(tarfile.XHDTYPE, size=1 << 40),
    "long name of a terabyte": header_alone(tarfile.GNUTYPE_LONGNAME, size=1 << 40),
    "long name of more bytes than can be counted": header_alone(tarfile.GNUTYPE_LONGNAME, size=1 << 70),
    "expression that exhausts the parser": shape("(" + "-" * 9000 + "1,)"),
    "unbalanced expression": shape("(" * 9000),
    "member twice": lambda path: members(path, whole_record()[0], *whole_record()),
    "escape sequence in the key": lambda path: members(path, *whole_record("a\x1b[31m")),
}
