"""Identity of the process that writes a run's status, by which other processes see whether it still runs."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

_PROC = Path("/proc")

Count = Annotated[int, Field(ge=0, le=2**63 - 1)]


class ProcessIdentity(BaseModel):
    """A process; a value that the system does not report is None."""

    model_config = ConfigDict(strict=True)

    host: str | None = None
    boot_id: str | None = None
    """Id of the boot of the host."""
    pid: Count | None = None
    pid_namespace: str | None = None
    process_start_ticks: Count | None = None
    """Clock ticks from the boot to the start of the process."""


def own_identity() -> ProcessIdentity:
    """Return the identity of this process."""
    return ProcessIdentity(
        host=socket.gethostname(),
        boot_id=_boot_id(),
        pid=os.getpid(),
        pid_namespace=_pid_namespace(),
        process_start_ticks=start_ticks(os.getpid()),
    )


def is_alive(process: ProcessIdentity) -> bool | None:
    """Return whether the process still runs; None if unknown, such as on another host."""
    here = (socket.gethostname(), _boot_id(), _pid_namespace())
    if None in here or here != (process.host, process.boot_id, process.pid_namespace):
        return None
    if process.pid is None or process.process_start_ticks is None:
        return None
    return start_ticks(process.pid) == process.process_start_ticks


def is_suspended(process: ProcessIdentity) -> bool:
    """Return whether a signal such as SIGSTOP suspended the process; False where that is unknown."""
    return is_alive(process) is True and process.pid is not None and (_fields(process.pid) or " ")[0] == "T"


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since the boot; None where it is gone, or a zombie.

    The id of a process that ended is used again later, by a process with another start.
    """
    fields = _fields(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def _fields(pid: int) -> list[str] | None:
    """Return the fields of proc(5)'s stat from the state on; None where the process is gone."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()  # after the name, which may have spaces


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
