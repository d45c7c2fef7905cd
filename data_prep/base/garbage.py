"""Garbage collection of processes that hold many documents."""

from __future__ import annotations

import atexit
import gc

_OBJECTS = 50_000


def collect_rarely() -> None:
    """Look for reference cycles less often in this process, and not at its end.

    Preparation creates many lists and tuples and hardly any cycle. With Python's own threshold of 700 objects the
    search takes a sixth of its CPU time. The last search, which finds only what the modules hold, takes longer than
    the start of numpy.
    """
    gc.set_threshold(_OBJECTS, 20, 20)
    atexit.register(gc.freeze)
