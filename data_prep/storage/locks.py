"""One command at a time on an output folder, and the ranges of one array together.

Locally the system's own file locks (flock), which end with the process however it ends; in an object store a lease
(`data_prep.storage.leases`), which expires. On NFS flock works between hosts on Linux; a file system that offers none
gets a warning.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, TextIO

from data_prep.base.errors import UserError
from data_prep.base.urls import is_remote, local_path, redact
from data_prep.storage.leases import hold_lease

LOCK_NAME = ".lock"

# A holder that ends takes the lock alone for a moment, to see whether it is the last.
_ATTEMPTS, _ATTEMPT_SECONDS = 5, 0.05
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class IsHeld(UserError):
    """Another command on this file system holds the lock: `holder`, "process N on HOST" as far as the lock tells."""

    def __init__(self, message: str, holder: str = "") -> None:
        super().__init__(message)
        self.holder = holder


class Lock(Protocol):
    """What a holder of the lock has."""

    def check(self) -> None:
        """Do nothing while the lock is held; raise UserError once it was lost."""


class _FileLock:
    def check(self) -> None:
        """The system keeps a file's lock until the process ends."""


@contextlib.contextmanager
def hold_lock(folder: str | Path, name: str = "", shared: bool = False) -> Iterator[Lock]:
    """Keep other commands from `folder` while the block runs; a killed holder blocks nobody, or not for long.

    Without a name the whole folder is held: nobody else holds any part of it. With one, such as "range-003-of-016",
    only the part so named: other names may be held at the same time, the whole folder not. With `shared` and no name
    several may hold the folder at once, but nobody as a whole.

    Raises:
        UserError: another command holds it (the message names its process and host; `IsHeld` where the folder is
            local), or the folder cannot be written.
    """
    if is_remote(folder):
        with hold_lease(str(folder), name, shared) as lease:
            yield lease
        return
    with contextlib.ExitStack() as held:
        whole = local_path(folder) / LOCK_NAME
        try:
            whole.parent.mkdir(parents=True, exist_ok=True)
            if name:
                held.enter_context(_locked(whole.with_name(f"{LOCK_NAME}-{name}"), str(folder)))
            held.enter_context(_locked(whole, str(folder), shared=shared or bool(name)))
        except OSError as error:
            raise UserError(
                f"{folder} cannot be written: {error.strerror or error}; see to it and run the same command again, "
                "which goes on from there"
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
                f"another command ({holder}) works on {folder} now; wait until it ends, or choose another folder",
                holder,
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                file.close()
                raise
            print(
                f"warning: the file system of {redact(folder)} offers no locks ({error.strerror}); see that no other "
                "command works on this folder",
                file=sys.stderr,
                flush=True,
            )
            return file
        # The owner before may have removed the file between our opening and locking it: then it locks
        # nothing.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                return file
        file.close()


def _holder_of_a_part(whole: Path) -> str:
    """Who holds a named part of the folder; empty where nobody does."""
    for path in sorted(whole.parent.glob(f"{whole.name}-*")):
        with contextlib.suppress(FileNotFoundError), open(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return f"{path.name.removeprefix(whole.name + '-')}, {file.read().strip()}"
    return ""


def _remove_if_last(file: TextIO, path: Path) -> None:
    """Remove the lock's file, unless others hold it too."""
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
