"""Parts of work files, each followed by its checksum, because work files may stay on a disk for weeks."""

from __future__ import annotations

from typing import BinaryIO

import xxhash

from data_prep.base.errors import UserError
from data_prep.storage import storage

CHECKSUM_BYTES = 8


def sealed(part: bytes) -> bytes:
    """Return the part of a file followed by its checksum."""
    return part + xxhash.xxh3_64_digest(part)


def unsealed(data: bytes, url: str) -> memoryview:
    """Return the part that `sealed` was given.

    Raises:
        UserError: the checksum does not match.
    """
    part, checksum = memoryview(data)[:-CHECKSUM_BYTES], memoryview(data)[-CHECKSUM_BYTES:]
    if xxhash.xxh3_64_digest(part) != checksum:
        raise damaged(url)
    return part


def read_sealed(file: BinaryIO, url: str, offset: int, num_bytes: int) -> memoryview:
    """Read a part of `num_bytes` bytes and check it.

    Raises:
        UserError: the checksum does not match.
    """
    file.seek(offset)
    data = file.read(num_bytes + CHECKSUM_BYTES)
    if len(data) != num_bytes + CHECKSUM_BYTES:
        raise damaged(url)
    return unsealed(data, url)


def damaged(url: str) -> UserError:
    """Return the error for a work file whose checksum does not match."""
    return UserError(
        f"{storage.redact(url)} is damaged, or was written by an earlier release",
        fix="rerun the same command with --fresh",
        code="damaged-work-file",
    )
