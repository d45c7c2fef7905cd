"""Files of shards on this machine: copies of remote ones in a cache, and local ones that were verified.

The cache is one folder that all processes of a machine share, limited in size.

One process fetches each file while the others wait, and checks its sha256. When space is needed, the least recently
used file is removed. A process that has mapped a removed file keeps its map (POSIX), so files in use need no
registration; the disk space is freed when the last map is closed. A thread fetches ahead in the order of requests.
Local files are verified in the same way: each by one process of a machine, ahead of their use.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import queue
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.base.errors import UserError
from data_prep.storage import storage
from data_prep.storage.storage_options import with_these_options

_LOCKS = ".locks"
_IDLE_SECONDS = 0.05
_OWN_NAME = re.compile(r"[0-9a-f]{32}-.+")  # `CachedFile.name`; other files in the folder belong to the user


class DamagedFile(UserError):
    """A file that is missing, or whose bytes differ from its manifest."""


@dataclass(frozen=True)
class CachedFile:
    """File to fetch: URL and expected contents."""

    url: str
    bytes: int
    sha256: str

    @property
    def name(self) -> str:
        """Name in the cache; different contents have different names."""
        return f"{self.sha256[:32]}-{self.url.rpartition('/')[2].partition('?')[0]}"


class ShardCache:
    """Cache in `folder` of at most about `max_bytes`."""

    def __init__(self, folder: Path, max_bytes: int, download: Callable[[str, Path], None]) -> None:
        """`download` writes the file at a URL to a local path, with its own retries."""
        self._folder, self._max_bytes, self._download = folder, max_bytes, download

    def map(self, file: CachedFile, dtype: np.dtype) -> np.ndarray:
        """Map the file as an array of `dtype`; fetch it first if it is missing.

        Raises:
            DamagedFile: the fetched file differs from its manifest, or does not exist.
            UserError: the store cannot be read, or the folder cannot be written.
        """
        path = self._folder / file.name
        while True:
            self.fetch(file)
            try:
                os.utime(path)  # used now, so removed last
                return np.memmap(path, dtype, mode="r")
            except FileNotFoundError:  # removed meanwhile by a process that needed space
                continue

    def fetch(self, file: CachedFile, wait: bool = True) -> bool:
        """Ensure that the file is in the cache; return False if another process fetches it and `wait` is False.

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
            self._evict(file.bytes, path)
            while True:
                try:
                    self._download(file.url, partial)
                    break
                except (OSError, UserError) as error:
                    # The disk is full although the cache is not: remove what can be removed, and retry.
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
            self._evict(0, path)  # other processes may have added files meanwhile
        finally:
            partial.unlink(missing_ok=True)

    def _evict(self, num_bytes: int, except_for: Path) -> None:
        """Remove files other than `except_for` until `num_bytes` more are within the limit, or none is left."""
        with self._locked("room", wait=True):
            files = self._files()
            left = sum(size for _, size, _ in files) + num_bytes - self._max_bytes
            for _, size, path in files:
                if left <= 0:
                    return
                if path != except_for:
                    path.unlink(missing_ok=True)
                    left -= size

    def _remove_oldest(self) -> bool:
        """Remove the least recently used file; return False if there is none."""
        with self._locked("room", wait=True):
            files = self._files()
            if files:
                files[0][2].unlink(missing_ok=True)
            return bool(files)

    def _remove_abandoned(self) -> None:
        """Remove partial downloads of killed processes, whose locks are free."""
        for partial in self._folder.glob(f".*{storage.PARTIAL_SUFFIX}"):
            name = partial.name.removeprefix(".").removesuffix(storage.PARTIAL_SUFFIX)
            if _OWN_NAME.fullmatch(name):
                with self._locked(name, wait=False) as mine:
                    if mine:
                        partial.unlink(missing_ok=True)

    def _files(self) -> list[tuple[float, int, Path]]:
        """Return (last use, bytes, path) of the files, the least recently used first, without partial downloads."""
        files = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if _OWN_NAME.fullmatch(entry.name) and entry.is_file():
                        status = entry.stat()
                        files.append((status.st_mtime, status.st_size, Path(entry.path)))
        return sorted(files)

    @contextlib.contextmanager
    def _locked(self, name: str, wait: bool) -> Iterator[bool]:
        """Lock that name within the block; yield False if another process has the lock."""
        with contextlib.ExitStack() as stack:
            try:
                mine = stack.enter_context(_lock(self._folder / _LOCKS / name, wait)) is not None
            except OSError as error:
                raise UserError(
                    f"the cache {self._folder} cannot be written: {error.strerror}",
                    fix="set data.cache_dir to a writable directory",
                    code="unwritable-cache",
                ) from None
            yield mine


@contextlib.contextmanager
def _lock(path: Path, wait: bool) -> Iterator[int | None]:
    """Lock a file within the block; yield its descriptor, or None if another process has the lock.

    The system frees the lock at a kill.

    Raises:
        OSError: the file cannot be written, or its file system has no locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield None
            return
        try:
            yield file.fileno()
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a child forked meanwhile has the file open too


def _check(file: CachedFile, path: Path) -> None:
    fix = "upload it again, or prepare the text again"
    if path.stat().st_size != file.bytes:
        raise DamagedFile(
            f"{storage.redact(file.url)} is damaged: {path.stat().st_size} bytes, and {file.bytes} in the manifest",
            fix=fix,
            code="damaged-shard",
        )
    sha256 = storage.sha256_of(path)
    if sha256 != file.sha256:
        raise DamagedFile(
            f"{storage.redact(file.url)} is damaged: its sha256 is {sha256}, and {file.sha256} in the manifest",
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


class Prefetcher:
    """Prefetcher of files in the order of requests.

    Its thread ends when nothing has been requested for a moment, so that an unused shard set leaves no thread behind.
    """

    def __init__(self, fetch: Callable[[CachedFile], object]) -> None:
        """`fetch` downloads or verifies a file unless another process does so."""
        self._fetch = fetch
        self._waiting: queue.SimpleQueue[CachedFile] = queue.SimpleQueue()
        self._requested: set[str] = set()
        self._thread: threading.Thread | None = None

    def ask(self, file: CachedFile) -> None:
        """Request a file; a file that was requested before is not fetched again."""
        if file.name in self._requested:
            return
        self._requested.add(file.name)
        self._waiting.put(file)
        # Forked workers of DataLoader do not inherit the thread, which the warmup step starts before the fork.
        thread = self._thread
        if thread is None or not thread.is_alive():
            self._thread = threading.Thread(target=with_these_options(self._run), name="prefetch", daemon=True)
            self._thread.start()

    def forget(self, file: CachedFile) -> None:
        """Allow new requests for a file after its use, because the cache may have removed it by then."""
        self._requested.discard(file.name)

    def _run(self) -> None:
        while True:
            try:
                file = self._waiting.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                self._thread = None  # before the last look, so that a request after it starts another thread
                if self._waiting.empty():
                    return
                continue
            try:
                self._fetch(file)
            except (UserError, OSError):
                # The batch that needs the file fetches it again and raises the error.
                self.forget(file)


def is_sound(path: Path, sha256: str, marks: Path, wait: bool = True) -> bool:
    """Return whether a local file has this sha256.

    A file that was verified before and not written since is not read again: not every rank and worker hashes every
    shard. A mark in the folder `marks` names the file by path, inode, size and times of change; copying times does not
    reset the last of these. While one process reads the file, the others wait for its mark; without `wait` they get
    False. The processes lock the mark, which counts once something is written in it: a network file system may hide a
    new file from a host that looked for it, but never what was written in a file that the host locks afterwards.

    Raises:
        OSError: the file is missing or cannot be read.
    """
    mark = marks / _name(path, sha256)
    with contextlib.suppress(OSError):
        if mark.stat().st_size:
            return True
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # without locks the other processes read the file too
            locked = stack.enter_context(_lock(mark, wait))
            if locked is None or os.fstat(locked).st_size:
                return locked is not None
        if storage.sha256_of(path) != sha256:
            return False
        with contextlib.suppress(OSError):
            marks.mkdir(parents=True, exist_ok=True)
            mark.write_bytes(b"verified")
    return True


def _name(path: Path, sha256: str) -> str:
    status = path.stat()
    facts = ("written", path.resolve(), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, sha256)
    return hashlib.sha256(repr(facts).encode()).hexdigest()
