"""Glob patterns: every file that matches, and an error for each match that cannot be read as a file."""

from __future__ import annotations

import bisect
import fnmatch
import glob
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from data_prep.base.errors import UsageError, UserError
from data_prep.base.logs import logger

_SHOWN = 5
_Identity = tuple[int, int]  # device and inode of a folder


def local_matches(path: Path) -> list[str]:
    """Return the sorted files of a path or a pattern (`*`, `?`, `[...]`, `**`); empty if nothing matches.

    A file or folder whose name equals a part of the pattern wins over the pattern. Hidden names match only patterns
    that begin with a dot. Links are followed, except back into a folder that contains them.

    Raises:
        UsageError: the pattern matches a folder but none of its files, a dangling link, or a pipe or device.
        UserError: a folder on the way cannot be read.
    """
    parts = path.parts[1:] if path.is_absolute() else path.parts
    found = {str(path)} if _is_there(str(path)) else set(_walk(path.anchor, parts, ()))
    files = sorted(name for name in found if os.path.isfile(name))
    others = sorted(found.difference(files))
    folders = [name for name in others if os.path.isdir(name)]
    empty = [name for name in folders if name != str(path) and not _holds_something(name)]
    refuse_unread(str(path), files, sorted(set(folders).difference(empty)))
    if empty:
        listed = ", ".join(empty[:_SHOWN]) + (f" and {len(empty) - _SHOWN:,} more" if empty[_SHOWN:] else "")
        what = "empty folder" if len(empty) == 1 else "empty folders"
        logger(__name__).warning(f"input {path} matches {len(empty):,} {what}: {listed}")
    for name in sorted(set(others).difference(folders)):
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
    return files


def matching_names(names: Sequence[str], pattern: str) -> list[str]:
    """Return the names in a folder that one part of a pattern matches; a name that equals it wins over the pattern."""
    if pattern in names and pattern != "**":
        return [pattern]
    return [
        name
        for name in names
        if fnmatch.fnmatchcase(name, pattern) and (pattern.startswith(".") or not name.startswith("."))
    ]


def refuse_unread(pattern: str, files: Sequence[str], folders: Sequence[str], separator: str = os.sep) -> None:
    """Raise if a pattern matches a folder but none of the folder's files.

    Other tools write folders called NAME.parquet, which would be skipped silently.

    Args:
        files: the files that the pattern matches, sorted.

    Raises:
        UsageError: names the first such folder.
    """
    for folder in folders:
        inside = folder.rstrip(separator) + separator
        index = bisect.bisect_left(files, inside)
        if index == len(files) or not files[index].startswith(inside):
            also = "" if folder == pattern else f", which {pattern} matches,"
            raise UsageError(
                f"input {folder}{also} is a folder",
                fix=f"name its files with a pattern such as '{inside}*.jsonl.gz'",
                code="input-is-folder",
            )


def _walk(folder: str, parts: tuple[str, ...], above: tuple[_Identity, ...], was_found: bool = False) -> Iterator[str]:
    """Yield matching paths below `folder`; `above` are the folders that `**` went through.

    A forbidden path below a folder that a wildcard matched (`was_found`), such as lost+found, gets a warning.
    """
    first, rest = parts[0], parts[1:]
    if not glob.has_magic(first):
        path = os.path.join(folder, first)
        try:
            if rest and _is_folder(path):
                yield from _walk(path, rest, above, was_found)
            elif not rest and _is_there(path):
                yield path
        except _Forbidden as error:
            if not was_found:
                raise
            logger(__name__).warning(f"{error} The path is skipped.")
        return
    if first == "**" and rest:
        yield from _walk(folder, rest, above, was_found=True)
    for name in matching_names(_names(folder), first):
        path = os.path.join(folder, name)
        if not rest:
            yield path
        if not _is_folder(path):
            continue
        if first != "**" and rest:
            yield from _walk(path, rest, above, was_found=True)
        elif first == "**" and (identity := _identity(path)) not in (*above, _identity(folder or os.curdir)):
            yield from _walk(path, parts, (*above, _identity(folder or os.curdir), identity), was_found=True)


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


def _is_there(path: str) -> bool:
    return _status(path, follow_links=False) is not None


def _is_folder(path: str) -> bool:
    status = _status(path, follow_links=True)
    return status is not None and stat.S_ISDIR(status.st_mode)


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


def _identity(folder: str) -> _Identity:
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def _holds_something(path: str) -> bool:
    """Whether a folder has an entry that is not hidden."""
    return any(not name.startswith(".") for name in _names(path))
