"""Processes that end when the one that began them does, by SIGKILL too."""

from __future__ import annotations

import ctypes
import os
import signal

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>


def end_with_parent(parent: int | None = None) -> None:
    """Have Linux send this process SIGTERM when its parent is gone; it holds for the program executed next as well.

    Linux looks from now on alone: `parent` is the process id that the parent had, where it may be gone already. Its
    parent is to Linux the thread that began it, which has to stay as long.
    """
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)
