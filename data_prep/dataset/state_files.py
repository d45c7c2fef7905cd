"""State files of unfinished work: JSON with a checksum, because work may wait on a disk for weeks."""

from __future__ import annotations

import json
from typing import Any

import xxhash

from data_prep.storage import storage
from data_prep.storage.sealing import damaged


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
