"""Locks in an object store: small objects that their holder renews and that expire with it.

A store has no locks, but it can refuse to create an object that is there (If-None-Match) or to replace one that
changed (If-Match). A lease is such an object. A killed holder stops renewing it; a command that wants the lease
watches it for its whole period and then takes it over. Clocks of two machines are never compared. In a store without
conditional writes, two commands that start within the same second may both begin; the next renewal stops one of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.base.errors import UserError
from data_prep.base.urls import join, redact
from data_prep.storage import remote_files
from data_prep.storage.storage_options import with_these_options

LEASE_SECONDS = 60.0
WHOLE_NAME = ".lock.json"

_RENEWALS_A_LEASE = 4


class _Found(NamedTuple):
    """The content of a lease in the store, and the store's description of the object, by which it is replaced."""

    values: dict[str, Any]
    info: dict[str, Any]


class Lease:
    """A held lease, renewed by a thread of its own until it is released."""

    def __init__(self, url: str, folder: str) -> None:
        """Take the lease at `url`."""
        self.url, self.folder = url, folder
        self.owner = secrets.token_hex(8)
        self._seconds = LEASE_SECONDS
        self._renewals = 0
        self._lost = ""
        self._released = threading.Event()
        self._take()
        self._thread = threading.Thread(
            target=with_these_options(self._renew_until_released), name="lease", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Raise UserError after the lease was lost, so that two commands do not continue the same work."""
        # The clock counts too: the thread may hang in a request, or the process may have been suspended.
        if time.monotonic() - self._renewed_at > self._seconds:
            self._lost = self._lost or f"it could not be renewed for {self._seconds:.0f} s"
        if self._lost:
            raise UserError(
                f"the lock on {redact(self.folder)} was lost: {self._lost}",
                fix="make sure that no other command works on it and rerun the same command; it resumes",
                code="lock-lost",
            )

    def release(self) -> None:
        """Release the lease; if that fails, the lease expires."""
        self._released.set()
        self._thread.join()
        # A short limit: if the store is down, the user waits for that message.
        seconds = self._seconds / _RENEWALS_A_LEASE
        with contextlib.suppress(UserError):
            found = _read(self.url, seconds)
            if found and found.values.get("owner") == self.owner:
                remote_files.remove(self.url, seconds)

    def _take(self) -> None:
        while True:
            began_at = time.monotonic()
            if not remote_files.create(self.url, self._content()):
                found = _read(self.url)
                # The lease is ours if the store created it and its answer was lost.
                if found and found.values.get("owner") != self.owner:
                    _refuse_if_held(self.url, self.folder, found)
                began_at = time.monotonic()
                if found:
                    remote_files.replace(self.url, self._content(), found.info)
            found = _read(self.url)
            # A busy store may have written it long ago: then it is written again.
            if found and found.values.get("owner") == self.owner and time.monotonic() - began_at < self._seconds / 2:
                self._renewed_at = began_at
                return

    def _renew_until_released(self) -> None:
        interval = self._seconds / _RENEWALS_A_LEASE
        while not self._lost and not self._released.wait(interval):
            began_at = time.monotonic()
            # check() reports failures once no renewal has succeeded for the lease's time.
            with contextlib.suppress(UserError):
                found = _read(self.url, interval)
                if found is None or found.values.get("owner") != self.owner:
                    self._lost = "it was removed" if found is None else f"{_holder(found)} took it over"
                    return
                self._renewals += 1
                if remote_files.replace(self.url, self._content(), found.info, interval):
                    self._renewed_at = began_at

    def _content(self) -> bytes:
        values = {
            "owner": self.owner,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process": _process_mark(os.getpid()),
            "machine": _machine_mark(),
            "lease_seconds": self._seconds,
            "renewals": self._renewals,
        }
        return json.dumps(values).encode()


@contextlib.contextmanager
def hold_lease(folder: str, name: str = "") -> Iterator[Lease]:
    """Hold the whole folder, or the named part of it, as `data_prep.storage.locks.hold_lock` does.

    Both kinds first write their own lease and then look for the other kind, so of two that begin at once at most
    one continues.
    """
    _refuse_others(folder, name)
    lease = Lease(join(folder, f".lock-{name}.json" if name else WHOLE_NAME), folder)
    try:
        _refuse_others(folder, name)
        yield lease
    finally:
        lease.release()


def _refuse_if_held(url: str, folder: str, found: _Found) -> None:
    """Raise UserError if the holder of a lease is alive."""
    values = found.values
    if values.get("machine") and values["machine"] == _machine_mark():
        living = found if _process_mark(values["pid"]) == values.get("process") else None
    else:
        living = _watch(url, folder, found)
    if living:
        raise UserError(
            f"another command ({_holder(living)}) is using {redact(folder)}",
            fix="wait until it ends, or choose another folder",
            code="folder-locked",
        )


def _watch(url: str, folder: str, found: _Found) -> _Found | None:
    """Watch a lease for its period; return it once it changed, or None if it stayed as it was."""
    seconds = float(found.values.get("lease_seconds", LEASE_SECONDS))
    print(
        f"{redact(folder)} is locked by {_holder(found)}; waiting up to {seconds:.0f} s to see whether it is alive",
        file=sys.stderr,
        flush=True,
    )
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(seconds / (2 * _RENEWALS_A_LEASE))
        now = _read(url)
        if now is None or now.values != found.values:
            return now
    return None


def _refuse_others(folder: str, name: str) -> None:
    """Raise if the whole is held and a part is wanted, or the reverse; remove the leases of dead holders."""
    entries = remote_files.list_folder(folder)
    names = [entry["name"].rpartition("/")[2] for entry in entries]
    for other in names:
        is_part = other.startswith(".lock-") and other.endswith(".json")
        if (other == WHOLE_NAME) if name else is_part:
            url = join(folder, other)
            found = _read(url)
            if found:
                _refuse_if_held(url, folder, found)
                remote_files.remove(url)


def _read(url: str, seconds: float | None = None) -> _Found | None:
    # The description comes first, so that a lease that changes in between is not replaced by mistake.
    info = remote_files.info(url, seconds)
    if info is None:
        return None
    try:
        return _Found(json.loads(remote_files.read_bytes(url, seconds)), info)
    except ValueError:
        return _Found({}, info)
    except UserError:
        if remote_files.info(url, seconds) is None:
            return None
        raise


def _holder(found: _Found) -> str:
    return f"process {found.values.get('pid', 'unknown')} on {found.values.get('host', 'unknown')}"


def _machine_mark() -> str:
    """A name shared by exactly the processes that see each other's process ids; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _process_mark(pid: int) -> str:
    """The start time of the process, which tells it from another with the same id; empty if there is none."""
    try:
        # The name, in brackets, may contain spaces; the 22nd field is the start time.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
