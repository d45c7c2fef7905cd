"""Local copies of remote files: one folder that all processes of a machine share, kept below a size.

Each file is fetched by one process while the others wait, checked against its sha256 on arrival, and removed when
room is needed and it is the one unused for longest. A process that has mapped a file keeps it although it is removed
(POSIX), so nobody needs to say what is in use; the disk gets the room back when the last map is dropped.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.base.errors import UserError
from data_prep.storage import storage

_LOCKS = ".locks"
_OWN_NAME = re.compile(r"[0-9a-f]{32}-.+")  # `CachedFile.name`; whatever else lies in the folder is the user's


class DamagedFile(UserError):
    """A file that is missing, or whose bytes differ from its manifest."""


@dataclass(frozen=True)
class CachedFile:
    """A file to be had: where it comes from, and what it must be."""

    url: str
    bytes: int
    sha256: str

    @property
    def name(self) -> str:
        """Its name in the cache; no two different contents share one."""
        return f"{self.sha256[:32]}-{self.url.rpartition('/')[2].partition('?')[0]}"


class ShardCache:
    """The cache in `folder`, of at most about `max_bytes`."""

    def __init__(self, folder: Path, max_bytes: int, download: Callable[[str, Path], None]) -> None:
        """`download` writes the file at a URL to a local path, with retries of its own."""
        self._folder, self._max_bytes, self._download = folder, max_bytes, download

    def map(self, file: CachedFile, dtype: np.dtype) -> np.ndarray:
        """The file as an array of `dtype`, mapped; fetched where it is not there.

        Raises:
            DamagedFile: what came is not what it should be, or there is no such file.
            UserError: the store or the folder refuses.
        """
        path = self._folder / file.name
        while True:
            self.fetch(file)
            try:
                os.utime(path)  # used now: the last to be removed
                return np.memmap(path, dtype, mode="r")
            except FileNotFoundError:  # removed by a process that needed room, since it was fetched
                continue

    def fetch(self, file: CachedFile, wait: bool = True) -> bool:
        """Make sure that the file is there; False where another process is at it and `wait` is False.

        Raises:
            As `map`.
        """
        path = self._folder / file.name
        if path.is_file():
            return True
        with self._locked(file.name, wait) as mine:
            if mine and not path.is_file():
                self._fetch(file, path)
            return mine

    def _fetch(self, file: CachedFile, path: Path) -> None:
        partial = path.with_name(f".{path.name}{storage.PARTIAL_SUFFIX}")
        self._remove_abandoned()
        try:
            self._make_room(file.bytes, path)
            while True:
                try:
                    self._download(file.url, partial)
                    break
                except (OSError, UserError) as error:
                    # The disk is full though the cache is not: whatever can go makes room, and it is tried again.
                    if _is_disk_full(error) and self._remove_oldest():
                        continue
                    if isinstance(error, UserError):
                        raise
                    raise UserError(
                        f"the cache {self._folder} cannot be written: {error.strerror or error}",
                        fix="free space for the shards that are read at once (two windows of 16), or set "
                        "data.cache_dir to another directory",
                        code="unwritable-cache",
                    ) from None
            _check(file, partial)
            os.replace(partial, path)
            self._make_room(0, path)  # others may have come meanwhile
        finally:
            partial.unlink(missing_ok=True)

    def _make_room(self, num_bytes: int, kept: Path) -> None:
        """Remove files other than `kept` until `num_bytes` more are within the limit, or none is left."""
        with self._locked("room", wait=True):
            files = self._files()
            left = sum(size for _, size, _ in files) + num_bytes - self._max_bytes
            for _, size, path in files:
                if left <= 0:
                    return
                if path != kept:
                    path.unlink(missing_ok=True)
                    left -= size

    def _remove_oldest(self) -> bool:
        """Remove the file unused for longest; False where there is none."""
        with self._locked("room", wait=True):
            files = self._files()
            if files:
                files[0][2].unlink(missing_ok=True)
            return bool(files)

    def _remove_abandoned(self) -> None:
        """Remove what killed processes had half fetched: the lock of its name is free."""
        for partial in self._folder.glob(f".*{storage.PARTIAL_SUFFIX}"):
            name = partial.name.removeprefix(".").removesuffix(storage.PARTIAL_SUFFIX)
            if _OWN_NAME.fullmatch(name):
                with self._locked(name, wait=False) as mine:
                    if mine:
                        partial.unlink(missing_ok=True)

    def _files(self) -> list[tuple[float, int, Path]]:
        """(last use, bytes, path) of the files, the one unused for longest first; what is being fetched left out."""
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if _OWN_NAME.fullmatch(entry.name) and entry.is_file():
                        status = entry.stat()
                        found.append((status.st_mtime, status.st_size, Path(entry.path)))
        return sorted(found)

    @contextlib.contextmanager
    def _locked(self, name: str, wait: bool) -> Iterator[bool]:
        """Hold the lock of that name, which the system frees at a kill; False where another process has it."""
        locks = self._folder / _LOCKS
        try:
            locks.mkdir(parents=True, exist_ok=True)
            file = open(locks / name, "wb")
        except OSError as error:
            raise UserError(
                f"the cache {self._folder} cannot be written: {error.strerror}",
                fix="set data.cache_dir to a writable directory",
                code="unwritable-cache",
            ) from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            try:
                yield True
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # a process forked meanwhile has the file open too


def _check(file: CachedFile, path: Path) -> None:
    fix = "upload it again, or prepare the text again"
    if path.stat().st_size != file.bytes:
        raise DamagedFile(
            f"{storage.redact(file.url)} is damaged: {path.stat().st_size} bytes, and {file.bytes} in the manifest",
            fix=fix,
            code="damaged-shard",
        )
    found = storage.sha256_of(path)
    if found != file.sha256:
        raise DamagedFile(
            f"{storage.redact(file.url)} is damaged: its sha256 is {found}, and {file.sha256} in the manifest",
            fix=fix,
            code="damaged-shard",
        )


def _is_disk_full(error: BaseException) -> bool:
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
