"""Which process writes a run's status, so that another one can see whether it still runs."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PROC = Path("/proc")


def own_identity() -> dict[str, Any]:
    """This process: host, boot of the host, pid, its namespace, and its start in clock ticks since the boot.

    What the system does not tell is None.
    """
    return {
        "host": socket.gethostname(),
        "boot_id": _boot_id(),
        "pid": os.getpid(),
        "pid_namespace": _pid_namespace(),
        "process_start_ticks": start_ticks(os.getpid()),
    }


def is_alive(identity: Mapping[str, Any]) -> bool | None:
    """Return whether the process of the identity still runs; None if unknown, such as on another host."""
    here = {"host": socket.gethostname(), "boot_id": _boot_id(), "pid_namespace": _pid_namespace()}
    if any(value is None or identity.get(name) != value for name, value in here.items()):
        return None
    if identity.get("pid") is None or identity.get("process_start_ticks") is None:
        return None
    started: int = identity["process_start_ticks"]
    return start_ticks(identity["pid"]) == started


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since the boot; None where it is gone, or a zombie.

    The number of a process that ended is given to others in time, with another start.
    """
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # after the name, which may hold spaces: state is the first, proc(5)
    return None if fields[0] in "ZX" else int(fields[19])


def _boot_id() -> str | None:
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


def _pid_namespace() -> str | None:
    try:
        return os.readlink(_PROC / "self/ns/pid")
    except OSError:
        return None
