"""Files at paths and URLs: the only module that distinguishes local disks from object stores.

A local write goes to a temporary name, is flushed to the disk and renamed; a remote write is a single completed put.
So a file under its final name is always complete, and its existence marks the work that made it as done.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO

from data_prep.base import urls
from data_prep.base.errors import UsageError, UserError
from data_prep.base.known_secrets import hide_secrets as hide_secrets
from data_prep.base.urls import absolute as absolute
from data_prep.base.urls import is_remote as is_remote
from data_prep.base.urls import join as join
from data_prep.base.urls import local_path as local_path
from data_prep.base.urls import redact as redact
from data_prep.storage import remote_files
from data_prep.storage.exact_keys import map_at_once as map_at_once
from data_prep.storage.locks import hold_lock as hold_lock
from data_prep.storage.patterns import local_matches
from data_prep.storage.storage_options import configure as configure
from data_prep.storage.storage_options import options as options
from data_prep.storage.storage_options import own_options as own_options
from data_prep.storage.storage_options import redacted_options as redacted_options
from data_prep.storage.storage_options import redacted_settings as redacted_settings
from data_prep.storage.store_errors import RESUME, UNUSABLE

PARTIAL_SUFFIX = ".partial"
_COPY_BYTES = 1 << 20


def exists(url: str | Path) -> bool:
    """Whether there is a file or a folder at `url`."""
    if is_remote(url):
        return remote_files.info(str(url)) is not None
    with explained(url, "read"):
        try:
            return local_path(url).exists()
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:  # such as a pattern of many braces: no file has such a name
                return False
            raise


def is_file(url: str | Path) -> bool:
    """Whether there is a file at `url`: no folder, and no pipe, which would be read forever."""
    if is_remote(url):
        found = remote_files.info(str(url))
        return found is not None and found["type"] == "file"
    with explained(url, "read"):
        return local_path(url).is_file()


def is_folder(url: str | Path) -> bool:
    """Whether there is a folder at `url`; a web server has none."""
    if is_remote(url):
        is_web = str(url).startswith(("http://", "https://"))
        return not is_web and (remote_files.info(str(url)) or {}).get("type") == "directory"
    return os.path.isdir(local_path(url))


def folder_of_file(url: str | Path) -> str | None:
    """Return the folder of a local file; None if `url` is not a local file."""
    with explained(url, "read"):
        return urls.folder_of_file(url)


def check_folder(option: str, folder: str) -> None:
    """Check that a folder to write is not an existing file, and that its store accepts its name."""
    if is_remote(folder):
        remote_files.check_name(folder)
    if folder_of_file(folder):
        raise UsageError(f"{option}={folder} is a file", fix="name a folder", code="output-is-a-file")


def size(url: str | Path) -> int:
    """Return the size of a file in bytes."""
    return size_and_stamp(url)[0]


def gives_ranges(url: str | Path) -> bool:
    """Whether parts of the file can be fetched without the rest; some web servers give whole files only."""
    return not is_remote(url) or remote_files.gives_ranges(str(url))


def stamp(url: str | Path) -> str:
    """Return a cheap mark that changes when the file is rewritten, touched, copied or moved.

    The mark is the store's own tag, or the size, times and inode of a local file (an mtime alone can be set back).
    """
    if is_remote(url):
        return remote_files.tag(remote_files.existing(str(url)))
    return size_and_stamp(url)[1]


def size_and_stamp(url: str | Path) -> tuple[int, str]:
    """Return `size` and `stamp` of a file at one moment, from one request."""
    if is_remote(url):
        described = remote_files.existing(str(url))
        return remote_files.size_of(str(url), described), remote_files.tag(described)
    with explained(url, "read"):
        found = local_path(url).stat()
        return found.st_size, f"{found.st_size}-{found.st_mtime_ns}-{found.st_ctime_ns}-{found.st_ino}"


def modified_at(url: str | Path) -> float | None:
    """Return when a local file was last written (Unix time); None for a remote file, whose clock may differ."""
    if is_remote(url):
        return None
    with explained(url, "read"):
        status = local_path(url).stat()
        return max(status.st_mtime, status.st_ctime)  # a copied mtime does not hide a change


def canonical(url: str | Path) -> str:
    """Return one spelling for all names of a local file; a URL stays as it is."""
    return str(url) if is_remote(url) else os.path.realpath(local_path(url))


def open_read(url: str | Path) -> BinaryIO:
    """Open for reading bytes; seekable."""
    if is_remote(url):
        return remote_files.open_file(str(url))
    with explained(url, "read"):
        return open(local_path(url), "rb")


def read_bytes(url: str | Path) -> bytes:
    """Return the content of a file."""
    if is_remote(url):
        return remote_files.read_bytes(str(url))
    with explained(url, "read"):
        return local_path(url).read_bytes()


def write_bytes(url: str | Path, data: bytes) -> None:
    """Write a file atomically; create a missing local folder."""
    if is_remote(url):
        remote_files.write_bytes(str(url), data)
        return
    with local_write(url) as path, explained(url, "written"):
        path.write_bytes(data)


@contextlib.contextmanager
def local_write(url: str | Path) -> Iterator[Path]:
    """Yield a temporary local path, and publish it at `url` if the block succeeds."""
    if is_remote(url):
        remote_files.check_name(str(url))  # before work of hours, rather than at its end
        with _staged(url) as staged:
            yield staged
            remote_files.upload(staged, str(url))
        return
    final = local_path(url)
    # Every attempt has its own name: threads of one process may write the same file.
    partial = final.with_name(f".{final.name}.{os.getpid()}-{secrets.token_hex(4)}{PARTIAL_SUFFIX}")
    try:
        with explained(url, "written"):
            if final.exists() and not (final.is_file() or final.is_dir()):
                raise UserError(
                    f"{url} is a device or a pipe, not a file", fix="choose another path", code="output-not-a-file"
                )
            final.parent.mkdir(parents=True, exist_ok=True)
            with _others_named(url, partial):
                yield partial
            flush(partial)
            os.replace(partial, final)
            flush(final.parent)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def copy(url: str | Path, to: str | Path) -> None:
    """Copy a file atomically."""
    with local_write(to) as path, open_read(url) as source, open(path, "wb") as target:
        shutil.copyfileobj(source, target, _COPY_BYTES)


def flush(path: Path) -> None:
    """Wait until a local file's content, or a folder's list of names, is on the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def list_names(folder: str | Path) -> list[str]:
    """Return the sorted names in a folder; empty if there is no such folder."""
    if is_remote(folder):
        entries = remote_files.list_folder(str(folder))
        return sorted(entry["name"].rstrip("/").rpartition("/")[2] for entry in entries)
    path = local_path(folder)
    with explained(folder, "read"):
        return sorted(os.listdir(path)) if path.is_dir() else []


def remove(url: str | Path) -> None:
    """Remove a file, or a folder with its content; do nothing if there is none."""
    if is_remote(url):
        remote_files.remove(str(url))
        return
    with explained(url, "removed"):
        path = local_path(url)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def remove_unfinished(folder: str | Path) -> None:
    """Remove the partial files of killed processes in `folder`; the caller holds its lock."""
    if is_remote(folder):
        remote_files.abort_uploads(str(folder))
        return
    for name in list_names(folder):
        if name.endswith(PARTIAL_SUFFIX):
            remove(join(folder, name))


def sha256_of(url: str | Path) -> str:
    """Return the sha256 of a file in hex; it is read in pieces."""
    digest = hashlib.sha256()
    with open_read(url) as file, explained(url, "read"):
        while piece := file.read(_COPY_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def local_copy(url: str | Path, cache_dir: str | Path, sha256: str) -> Path:
    """Return a local path of the file: its own, or that of a copy in `cache_dir`, which is fetched once.

    A fetched copy is checked against `sha256`; a local file is not read. Several processes and threads may request
    the same copy at once.
    """
    if not is_remote(url):
        with explained(url, "read"):
            is_there = local_path(url).is_file()
        if not is_there:
            raise UserError(f"{url} is missing", fix="restore it, or rebuild the data set", code="missing-file")
        return local_path(url)
    copy = Path(cache_dir) / f"{sha256[:16]}-{urls.name_of(url)}"
    if not copy.is_file():
        with local_write(copy) as partial:
            remote_files.download(str(url), partial)
            found = sha256_of(partial)
            if found != sha256:
                raise UserError(
                    f"{redact(url)} is damaged: its sha256 is {found} and must be {sha256}",
                    fix="upload it again",
                    code="damaged-file",
                )
    return copy


def local_folder(url: str | Path, names: Collection[str]) -> Path:
    """Return the folder itself if it is local, else a local copy of its files with one of the names.

    The copy is replaced when a file's tag in the store changes. Other files are not fetched: a tokenizer's folder may
    contain a model.
    """
    if not is_remote(url):
        return local_path(url)
    entries = [entry for entry in remote_files.list_folder(str(url)) if entry["type"] == "file"]
    tags = {entry["name"].rpartition("/")[2]: remote_files.tag(entry) for entry in entries}
    wanted = {name: tag for name, tag in tags.items() if name in names}
    if not wanted:
        raise UserError(f"{redact(url)} contains none of {', '.join(names)}", fix="check its name", code="missing-file")
    key = hashlib.sha256(repr((str(url), sorted(wanted.items()))).encode()).hexdigest()[:16]
    copy = cache_folder() / f"{key}-{urls.name_of(url)}"
    if not copy.is_dir():
        with explained(copy, "written"):
            copy.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=copy.parent, prefix=".clozeworks-") as partial:
                whole = Path(partial) / "whole"
                whole.mkdir()
                for name in wanted:
                    remote_files.download(join(url, name), whole / name)
                _rename_folder(whole, copy)
    return copy


def matches(pattern: str) -> list[str]:
    """Return the sorted files that a path, URL or glob pattern matches; empty if nothing matches.

    A file whose name equals the pattern wins over the pattern.
    """
    if is_remote(pattern):
        return remote_files.matching(pattern)
    return local_matches(local_path(pattern))


@contextlib.contextmanager
def explained(url: str | Path, what: str) -> Iterator[None]:
    """Turn an error of the system into a `UserError`; `what` is "read", "written" or "removed"."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{redact(url)} cannot be {what}: {error.strerror or error}",
            fix=RESUME if what == "written" else "check the path and its permissions",
            code=UNUSABLE[what],
        ) from None


@contextlib.contextmanager
def _staged(url: str | Path) -> Iterator[Path]:
    """Yield a temporary local path for a file that is then uploaded to `url`."""
    try:
        with tempfile.TemporaryDirectory(prefix="clozeworks-") as folder, _others_named(url, Path(folder)):
            yield Path(folder) / "upload"
    except OSError as error:
        raise UserError(
            f"{redact(url)} cannot be written: {error.strerror or error} in {tempfile.gettempdir()}, which holds files "
            "until their upload",
            fix="free space there or set TMPDIR to another folder, and rerun the same command; it resumes",
            code="temporary-folder-full",
        ) from None


@contextlib.contextmanager
def _others_named(url: str | Path, own: Path) -> Iterator[None]:
    """Report an error about a file that is not below `own`, such as the source of a copy, under its own name."""
    try:
        yield
    except OSError as error:
        other = error.filename
        if not isinstance(other, str | Path) or str(other).startswith(str(own)):
            raise
        raise UserError(
            f"{redact(other)} cannot be used while {redact(url)} is written: {error.strerror or error}",
            fix=RESUME,
            code="unreadable-file",
        ) from None


def cache_folder() -> Path:
    """Return the folder of this project's caches."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clozeworks"


def _rename_folder(folder: Path, final: Path) -> None:
    try:
        folder.rename(final)
    except OSError:
        if not final.is_dir():  # another process made the same copy
            raise
