"""Glob patterns: every file that matches, and an error for each match that cannot be read as a file.

One walk serves disks and stores (`Folders`); names in a folder are compared here.
"""

from __future__ import annotations

import bisect
import fnmatch
import glob
import os
import stat
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from data_prep.base.errors import UsageError, UserError
from data_prep.base.logs import logger

_SHOWN = 5


class Entry(NamedTuple):
    """What a folder lists; `kind` is file, directory or, on a disk, other: a pipe, a device or a dangling link."""

    path: str
    kind: str


class Folders(Protocol):
    """The folders of a disk or of a store."""

    def entries(self, folder: str, part: str, is_last: bool = True) -> Iterable[Entry]:
        """Return the entries of a folder whose names one part of a pattern matches (`matching_names`).

        Unless it `is_last`, a folder that a part without wildcards names need not exist.
        """

    def identity(self, folder: str) -> Hashable:
        """Return what two paths to the same folder have in common."""


def local_matches(path: Path) -> list[str]:
    """Return the sorted files of a path or a pattern (`*`, `?`, `[...]`, `**`); empty if nothing matches.

    A file or folder whose name equals a part of the pattern wins over the pattern. Hidden names match only patterns
    that begin with a dot. Links are followed, except back into a folder that contains them. A dangling link, a pipe
    and a device are errors.
    """
    parts = path.parts[1:] if path.is_absolute() else path.parts
    exact = _entry(str(path))
    found = [exact] if exact else [*walk(_DISK, path.anchor, parts)]
    for name in sorted(name for name, kind in found if kind == "other"):
        if os.path.islink(name) and not os.path.exists(name):
            raise UsageError(
                f"input {name} is a link to {os.readlink(name)}, which cannot be reached",
                fix="restore its target, or remove the link from the inputs",
                code="dangling-link",
            )
        raise UsageError(
            f"input {name} is not a file (a pipe or a device), or cannot be reached",
            fix="give regular files as inputs",
            code="input-not-a-file",
        )
    return files_of(_DISK, str(path), found)


def matching_names(names: Sequence[str], pattern: str) -> list[str]:
    """Return the names in a folder that one part of a pattern matches; a name that equals it wins over the pattern."""
    if pattern in names and pattern != "**":
        return [pattern]
    return [
        name
        for name in names
        if fnmatch.fnmatchcase(name, pattern) and (pattern.startswith(".") or not name.startswith("."))
    ]


def files_of(folders: Folders, pattern: str, found: Iterable[Entry]) -> list[str]:
    """Return the sorted files among the matches of a pattern.

    Other tools write folders called NAME.parquet, which would be skipped silently. So a folder that matches, and that
    holds something while none of its files match, is an error; empty folders get a warning.
    """
    found = set(found)
    goes_through_all = pattern.rstrip("/").rpartition("/")[2] == "**"  # which matches all that is not hidden
    files = sorted(path for path, kind in found if kind == "file")
    empty = []
    for folder in sorted(path for path, kind in found if kind == "directory"):
        inside = folder.rstrip("/") + "/"
        index = bisect.bisect_left(files, inside)
        if index < len(files) and files[index].startswith(inside):
            continue
        if folder != pattern and (goes_through_all or not any(folders.entries(folder, "*"))):
            empty.append(folder)
            continue
        also = "" if folder == pattern else f", which {pattern} matches,"
        raise UsageError(
            f"input {folder}{also} is a folder",
            fix=f"name its files with a pattern such as '{inside}*.jsonl.gz'",
            code="input-is-folder",
        )
    if empty:
        listed = ", ".join(empty[:_SHOWN]) + (f" and {len(empty) - _SHOWN:,} more" if empty[_SHOWN:] else "")
        what = "empty folder" if len(empty) == 1 else "empty folders"
        logger(__name__).warning(f"input {pattern} matches {len(empty):,} {what}: {listed}")
    return files


def walk(
    folders: Folders, folder: str, parts: Sequence[str], above: tuple[Hashable, ...] = (), was_found: bool = False
) -> Iterator[Entry]:
    """Yield what the parts of a pattern match below `folder`; a match may come twice.

    A forbidden path below a folder that a wildcard matched, such as lost+found, gets a warning.

    Args:
        above: identities of the folders that `**` went through.
        was_found: a wildcard matched `folder`.
    """
    first, rest = parts[0], parts[1:]
    is_wild = glob.has_magic(first)
    if first == "**":
        above = (*above, folders.identity(folder))
        if rest:
            yield from walk(folders, folder, rest, above, was_found=True)
    try:
        for entry in folders.entries(folder, first, is_last=not rest):
            if not rest:
                yield entry
            if entry.kind != "directory":
                continue
            if first != "**" and rest:
                yield from walk(folders, entry.path, rest, above, was_found or is_wild)
            elif first == "**" and folders.identity(entry.path) not in above:
                yield from walk(folders, entry.path, parts, above, was_found=True)
    except _Forbidden as error:
        if is_wild or not was_found:
            raise
        logger(__name__).warning(f"{error} The path is skipped.")


class _Disk:
    """The folders of this machine."""

    def entries(self, folder: str, part: str, is_last: bool = True) -> Iterator[Entry]:
        # Without wildcards the name is looked up, so that `..` and folders that cannot be listed work.
        names = matching_names(_names(folder), part) if glob.has_magic(part) else [part]
        for name in names:
            if (entry := _entry(os.path.join(folder, name))) is not None:
                yield entry

    def identity(self, folder: str) -> Hashable:
        status = os.stat(folder or os.curdir)
        return status.st_dev, status.st_ino


_DISK = _Disk()


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder or os.curdir))
    except OSError as error:
        raise UserError(
            f"folder {folder or os.curdir} cannot be read: {error.strerror or error}",
            fix="fix the cause, or exclude the folder from the pattern",
            code="unreadable-file",
        ) from None


class _Forbidden(UserError):
    """The system denies access to a path."""


def _entry(path: str) -> Entry | None:
    """The file, folder or other thing at a path; None if there is nothing."""
    status = _status(path, follow_links=True)
    if status is None:
        return None if _status(path, follow_links=False) is None else Entry(path, "other")
    kind = "directory" if stat.S_ISDIR(status.st_mode) else "file" if stat.S_ISREG(status.st_mode) else "other"
    return Entry(path, kind)


def _status(path: str, follow_links: bool) -> os.stat_result | None:
    """The status of a path; None if there is nothing (a forbidden path raises instead)."""
    try:
        return os.stat(path, follow_symlinks=follow_links)
    except PermissionError as error:
        raise _Forbidden(
            f"{path} cannot be read: {error.strerror}",
            fix="fix the permission, or exclude it from the inputs",
            code="unreadable-file",
        ) from None
    except (OSError, ValueError):
        return None
