"""Locks on an output folder: one command at a time, or several ranges of one array together.

A local folder uses file locks (flock), which the system releases when the process ends; an object store uses a lease
(`data_prep.storage.leases`), which expires. On NFS flock works between hosts on Linux; a file system without locks
gets a warning.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, TextIO

from data_prep.base.errors import UserError
from data_prep.base.logs import logger
from data_prep.base.urls import is_remote, local_path, redact
from data_prep.storage.leases import hold_lease

LOCK_NAME = ".lock"

# A holder that ends takes the exclusive lock for a moment, to see whether it is the last.
_ATTEMPTS, _ATTEMPT_SECONDS = 5, 0.05
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class IsHeld(UserError):
    """Another command on this file system holds the lock: `holder`, "process N on HOST" if known."""

    def __init__(self, problem: str, holder: str = "", *, fix: str = "", code: str = "folder-locked") -> None:
        super().__init__(problem, fix=fix, code=code)
        self.holder = holder


class Lock(Protocol):
    """A held lock."""

    def check(self) -> None:
        """Raise UserError if the lock was lost."""


class _FileLock:
    def check(self) -> None:
        """Do nothing: the system keeps a file's lock until the process ends."""


@contextlib.contextmanager
def hold_lock(folder: str | Path, name: str = "") -> Iterator[Lock]:
    """Keep other commands from `folder` while the block runs; a killed holder blocks nobody, or not for long.

    Without a name the lock covers the whole folder, and nobody else holds any part of it. With a name, such as
    "range-003-of-016", it covers that part: other names may be held at the same time, but not the whole folder.

    Raises:
        UserError: another command holds it (the message names its process and host; `IsHeld` where the folder is
            local), or the folder cannot be written.
    """
    if is_remote(folder):
        with hold_lease(str(folder), name) as lease:
            yield lease
        return
    with contextlib.ExitStack() as held:
        whole = local_path(folder) / LOCK_NAME
        try:
            whole.parent.mkdir(parents=True, exist_ok=True)
            if name:
                held.enter_context(_locked(whole.with_name(f"{LOCK_NAME}-{name}"), str(folder)))
            held.enter_context(_locked(whole, str(folder), shared=bool(name)))
        except OSError as error:
            raise UserError(
                f"{folder} cannot be written: {error.strerror or error}",
                fix="fix the cause and rerun the same command; it resumes",
                code="unwritable-file",
            ) from None
        yield _FileLock()


@contextlib.contextmanager
def _locked(path: Path, folder: str, shared: bool = False) -> Iterator[None]:
    file = _lock(path, folder, shared)
    os.register_at_fork(after_in_child=file.close)  # a child that outlives this process must not keep its lock
    with file:
        file.truncate(0)
        if not shared:
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
        try:
            yield
        finally:
            _remove_if_last(file, path)


def _lock(path: Path, folder: str, shared: bool) -> TextIO:
    refused = 0
    while True:
        file = open(path, "a+")
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            refused += 1
            if refused < _ATTEMPTS:
                file.close()
                time.sleep(_ATTEMPT_SECONDS)
                continue
            file.seek(0)
            holder = file.read().strip() or _holder_of_a_part(path) or "unknown"
            file.close()
            raise IsHeld(
                f"another command ({holder}) is using {folder}",
                holder,
                fix="wait until it ends, or choose another folder",
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                file.close()
                raise
            logger(__name__).warning(
                f"the file system of {redact(folder)} has no locks ({error.strerror}); make sure that no other command "
                "uses this folder"
            )
            return file
        # If the previous owner removed the file between our opening and locking it, the lock covers nothing.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                return file
        file.close()


def _holder_of_a_part(whole: Path) -> str:
    """The holder of a named part of the folder; empty if there is none."""
    for path in sorted(whole.parent.glob(f"{whole.name}-*")):
        with contextlib.suppress(FileNotFoundError), open(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return f"{path.name.removeprefix(whole.name + '-')}, {file.read().strip()}"
    return ""


def _remove_if_last(file: TextIO, path: Path) -> None:
    """Remove the file of a lock unless others hold the lock too."""
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
