"""Record on disk of verified local files, so that not every rank and worker hashes every shard."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from data_prep.storage import storage


def is_sound(path: Path, sha256: str, marks: Path) -> bool:
    """Return whether the file has this sha256; a file that was verified and not written since is not read again.

    A mark in the folder `marks` names the file by path, inode, size and times of change; copying times does not reset
    the last of these.
    """
    mark = marks / _name(path, sha256)
    if mark.exists():
        return True
    if storage.sha256_of(path) != sha256:
        return False
    with contextlib.suppress(OSError):  # without marks the next process only reads the file again
        marks.mkdir(parents=True, exist_ok=True)
        mark.touch()
    return True


def _name(path: Path, sha256: str) -> str:
    status = path.stat()
    facts = (path.resolve(), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, sha256)
    return hashlib.sha256(repr(facts).encode()).hexdigest()
