"""Processes that end with their parent, also when it is killed by SIGKILL."""

from __future__ import annotations

import ctypes
import os
import signal

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>


def end_with_parent(parent: int | None = None) -> None:
    """Make Linux send this process SIGTERM when its parent ends; this also holds for the program executed next.

    Linux only watches from now on: `parent` is the process id of the parent, if it may have ended already. For Linux
    the parent is the thread that started this process, which has to stay as long.
    """
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)
