"""Sealed files of unfinished work: every part is followed by its checksum, because work may wait on a disk for weeks.

A state file holds JSON values as one such part.
"""

from __future__ import annotations

import json
from typing import Any, BinaryIO

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


def write_state(url: str, values: Any) -> None:
    """Write JSON values atomically."""
    storage.write_bytes(url, json.dumps({"xxh3_64": _checksum(values), "values": values}).encode())


def read_state(url: str) -> Any:
    """Return the values as written.

    Raises:
        UserError: the file is damaged, or an earlier release wrote it.
    """
    try:
        stored = json.loads(storage.read_bytes(url))
    except (ValueError, RecursionError):
        stored = None
    if not isinstance(stored, dict) or stored.get("xxh3_64") != _checksum(stored.get("values")):
        raise damaged(url)
    return stored["values"]


def _checksum(values: Any) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(values).encode())
