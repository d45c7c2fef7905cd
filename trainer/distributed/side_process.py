"""Processes that a rank or a launcher starts beside itself: their environment, their end, their reports of failures."""

from __future__ import annotations

import ctypes
import os
import signal

from data_prep.base.environment import environment_now
from data_prep.storage import storage

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LONGEST_REASON = 500

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>


def side_environment() -> dict[str, str]:
    """Return this process's environment without the launcher's variables and without the GPUs, which training uses."""
    kept = {name: value for name, value in environment_now().items() if name not in LAUNCHER_VARIABLES}
    return kept | {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


def failure_reason(returncode: int, stderr: str, name: str) -> str:
    """Return the problem that a failed process reported, or how it ended; without the fix, which is for a command."""
    if returncode >= 0:
        text = storage.hide_secrets(stderr.strip())
        text = text[text.rfind("error: ") :] if "error: " in text else text
        reason = text.removeprefix("error: ").partition(". Fix: ")[0]
        return reason[-_LONGEST_REASON:] or f"the {name} process exited with status {returncode}"
    signal_name = next((each.name for each in signal.Signals if each == -returncode), f"signal {-returncode}")
    return f"the {name} process was killed by {signal_name}"


def end_with_parent(parent: int | None = None) -> None:
    """Make Linux send this process SIGTERM when its parent ends, also after an exec.

    Linux only watches from now on: `parent` is the process id of the parent, if it may have ended already. For Linux
    the parent is the thread that started this process, which has to stay as long.
    """
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)
