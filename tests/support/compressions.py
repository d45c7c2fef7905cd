"""Every way in which inputs may be compressed."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable

import zstandard


def _two_frames(data: bytes) -> bytes:
    return zstandard.compress(data[: len(data) // 2]) + zstandard.compress(data[len(data) // 2 :])


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": _two_frames,
}
