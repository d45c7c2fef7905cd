"""Files at paths and URLs: the one place that knows whether data lies on a disk or in an object store.

A local write goes to a temporary name, is flushed to the disk and renamed; a remote one is a single completed
put. So a file under its final name is always whole, and its existence says that the work that made it was
done.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, TextIO
from urllib.parse import urlsplit

import fsspec

from data_prep.errors import UsageError, UserError

PARTIAL_SUFFIX = ".partial"
_COPY_BYTES = 1 << 20


def is_remote(url: str | Path) -> bool:
    """Whether `url` lies in an object store or on a server rather than at a local path."""
    return "://" in str(url) and not str(url).startswith("file://")


def local_path(url: str | Path) -> Path:
    """The local path that a `file://` URL or a plain path means."""
    return Path(str(url).removeprefix("file://"))


def redact(url: str | Path) -> str:
    """The URL without user, password and query, fit for messages, manifests and logs."""
    if not is_remote(url):
        return str(url)
    parts = urlsplit(str(url))
    # Not urlunsplit: it makes sqlite:/x of sqlite:///x.
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def join(folder: str | Path, name: str) -> str:
    """The path or URL of `name` in `folder`."""
    return f"{str(folder).rstrip('/')}/{name}" if is_remote(folder) else os.path.join(local_path(folder), name)


def exists(url: str | Path) -> bool:
    """Whether there is a file (or, locally, a folder) at `url`."""
    if not is_remote(url):
        return local_path(url).exists()
    filesystem, path = _filesystem(url)
    return filesystem.exists(path)


def size(url: str | Path) -> int:
    """Size of the file in bytes."""
    with _explained(url, "read"):
        if not is_remote(url):
            return local_path(url).stat().st_size
        filesystem, path = _filesystem(url)
        return filesystem.size(path)


def stamp(url: str | Path) -> str:
    """A cheap mark that changes when the file is written again: size and time, or the store's own tag."""
    with _explained(url, "read"):
        if not is_remote(url):
            status = local_path(url).stat()
            return f"{status.st_size}-{status.st_mtime_ns}"
        filesystem, path = _filesystem(url)
        info = filesystem.info(path)
        mark = info.get("ETag") or info.get("etag") or info.get("LastModified") or info.get("created")
        return f"{info['size']}-{mark}"


def modified_at(url: str | Path) -> float | None:
    """When a local file was last written, in seconds since 1970; None for a remote one, whose clock is another's."""
    if is_remote(url):
        return None
    with _explained(url, "read"):
        status = local_path(url).stat()
        return max(status.st_mtime, status.st_ctime)  # a copied time of writing does not hide a change


def canonical(url: str | Path) -> str:
    """One spelling for every name of a local file; a URL is its own."""
    return str(url) if is_remote(url) else os.path.realpath(local_path(url))


def open_read(url: str | Path) -> BinaryIO:
    """Open for reading bytes; seekable."""
    with _explained(url, "read"):
        if not is_remote(url):
            return open(local_path(url), "rb")
        filesystem, path = _filesystem(url)
        return filesystem.open(path, "rb")


def read_bytes(url: str | Path) -> bytes:
    """The whole file."""
    with open_read(url) as file, _explained(url, "read"):
        return file.read()


def write_bytes(url: str | Path, data: bytes) -> None:
    """Write the whole file atomically, making the local folder where it is missing."""
    with local_write(url) as path, _explained(url, "written"):
        path.write_bytes(data)


@contextlib.contextmanager
def local_write(url: str | Path) -> Iterator[Path]:
    """Give a temporary local path to write to, and publish it at `url` when the block ends well.

    Raises:
        UserError: the place cannot be written (disk full, no permission, a file where a folder should be).
    """
    if is_remote(url):
        with tempfile.TemporaryDirectory(prefix="clozeworks-") as folder:
            partial = Path(folder) / "upload"
            with _explained(url, "written"):
                yield partial
                filesystem, path = _filesystem(url)
                filesystem.put_file(str(partial), path)
        return
    final = local_path(url)
    partial = final.with_name(f".{final.name}.{os.getpid()}{PARTIAL_SUFFIX}")
    try:
        with _explained(url, "written"):
            final.parent.mkdir(parents=True, exist_ok=True)
            yield partial
            _flush(partial)
            os.replace(partial, final)
            _flush(final.parent)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def list_names(folder: str | Path) -> list[str]:
    """Sorted names of what lies directly in `folder`; empty where there is no such folder."""
    if not is_remote(folder):
        path = local_path(folder)
        with _explained(folder, "read"):
            return sorted(os.listdir(path)) if path.is_dir() else []
    filesystem, path = _filesystem(folder)
    if not filesystem.exists(path):
        return []
    return sorted(name.rstrip("/").rpartition("/")[2] for name in filesystem.ls(path, detail=False))


def remove(url: str | Path) -> None:
    """Remove a file, or a folder with all that is in it; nothing happens where there is none."""
    with _explained(url, "removed"):
        if not is_remote(url):
            path = local_path(url)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
            return
        filesystem, path = _filesystem(url)
        if filesystem.exists(path):
            filesystem.rm(path, recursive=True)


def sha256_of(url: str | Path) -> str:
    """sha256 of the file's bytes in hex, read in pieces."""
    digest = hashlib.sha256()
    with open_read(url) as file, _explained(url, "read"):
        while piece := file.read(_COPY_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def local_copy(url: str | Path, cache_dir: str | Path | None, sha256: str) -> Path:
    """A local path of the file: its own if it is local, else that of a copy in `cache_dir`, fetched once.

    A fetched copy is checked against `sha256`; a local file is not read.

    Raises:
        UserError: the file is not there, or what came is not what `sha256` names.
    """
    if not is_remote(url):
        if not local_path(url).is_file():
            raise UserError(f"{url} is missing; restore it, or make the data set again")
        return local_path(url)
    if cache_dir is None:
        cache_dir = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clozeworks"
    copy = Path(cache_dir) / f"{sha256[:16]}-{urlsplit(str(url)).path.rpartition('/')[2]}"
    if not copy.is_file():
        with local_write(copy) as partial:
            with _explained(url, "read"):
                filesystem, path = _filesystem(url)
                filesystem.get_file(path, str(partial))
            found = sha256_of(partial)
            if found != sha256:
                raise UserError(
                    f"{redact(url)} is damaged: its sha256 is {found} and should be {sha256}; upload it again"
                )
    return copy


def expand(patterns: Sequence[str]) -> list[str]:
    """The input files that paths, URLs and glob patterns name, each once, sorted.

    Raises:
        UsageError: a pattern matches nothing or a folder, or names a file that is named already.
    """
    urls: list[str] = []
    for pattern in patterns:
        matches = sorted(_matches(pattern))
        if not matches:
            raise UsageError(
                f"no input file matches {redact(pattern)}; check the path, or quote a pattern such as "
                "'corpus/*.jsonl.gz'"
            )
        urls.extend(matches)
    twice = sorted({url for url in urls if urls.count(url) > 1}) if len(set(urls)) != len(urls) else []
    if twice:
        raise UsageError(f"input file {redact(twice[0])} is named twice; name every file once")
    return sorted(urls)


@contextlib.contextmanager
def hold_lock(folder: str | Path) -> Iterator[None]:
    """Keep other processes from working on the local `folder` while the block runs; the system frees it at a kill.

    Raises:
        UserError: another process works on it; the message names its process id.
    """
    if is_remote(folder):
        yield
        return
    path = local_path(folder) / ".lock"
    with _explained(folder, "written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _lock_file(path, str(folder))
    with file:
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _lock_file(path: Path, folder: str) -> TextIO:
    while True:
        file = open(path, "a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            file.close()
            raise UserError(
                f"another command (process {owner}) works on {folder} now; wait until it ends, or choose another folder"
            ) from None
        # The owner before may have removed the file between our opening and locking it: then it locks
        # nothing.
        if path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())):
            return file
        file.close()


def _matches(pattern: str) -> list[str]:
    if is_remote(pattern):
        filesystem, path = _filesystem(pattern)
        with _explained(pattern, "read"):
            if not glob.has_magic(path):
                return [pattern] if filesystem.isfile(path) else []
            return [filesystem.unstrip_protocol(match) for match in filesystem.glob(path) if filesystem.isfile(match)]
    path = str(local_path(pattern))
    if os.path.isdir(path):
        raise UsageError(
            f"input {pattern} is a folder; name its files with a pattern such as '{os.path.join(path, '*.jsonl.gz')}'"
        )
    if os.path.exists(path):
        return [path]
    return [match for match in glob.glob(path, recursive=True) if os.path.isfile(match)]


def _filesystem(url: str | Path) -> tuple[fsspec.AbstractFileSystem, str]:
    try:
        return fsspec.core.url_to_fs(str(url))
    except (ImportError, ValueError) as error:
        raise UsageError(f"{redact(url)} cannot be opened: {error}") from None


def _flush(path: Path) -> None:
    """Wait until a file's or folder's content is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _explained(url: str | Path, what: str) -> Iterator[None]:
    """Turn the system's refusal into the user's paragraph."""
    try:
        yield
    except OSError as error:
        # A server's refusal often is the URL itself.
        reason = error.strerror or str(error).replace(str(url), redact(url))
        remedy = (
            "see to it and run the same command again, which goes on from there" if what == "written" else "check it"
        )
        raise UserError(f"{redact(url)} cannot be {what}: {reason}; {remedy}") from None
