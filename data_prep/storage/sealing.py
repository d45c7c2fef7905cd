"""Parts of work files with their checksums behind them, since work may lie on a disk for weeks."""

from __future__ import annotations

from typing import BinaryIO

import xxhash

from data_prep.base.errors import UserError
from data_prep.storage import storage

CHECKSUM_BYTES = 8


def sealed(part: bytes) -> bytes:
    """The part of a file with its checksum behind it."""
    return part + xxhash.xxh3_64_digest(part)


def unsealed(data: bytes, url: str) -> memoryview:
    """What `sealed` was given.

    Raises:
        UserError: it is not as it was written.
    """
    part, checksum = memoryview(data)[:-CHECKSUM_BYTES], memoryview(data)[-CHECKSUM_BYTES:]
    if xxhash.xxh3_64_digest(part) != checksum:
        raise damaged(url)
    return part


def read_sealed(file: BinaryIO, url: str, offset: int, num_bytes: int) -> memoryview:
    """The part of this size, without the checksum behind it.

    Raises:
        UserError: it is not as it was written.
    """
    file.seek(offset)
    data = file.read(num_bytes + CHECKSUM_BYTES)
    if len(data) != num_bytes + CHECKSUM_BYTES:
        raise damaged(url)
    return unsealed(data, url)


def damaged(url: str) -> UserError:
    """The error about a work file that is not as it was written."""
    where = storage.redact(url)
    return UserError(f"{where} is damaged, or of an earlier release; run the same command again with --fresh")
