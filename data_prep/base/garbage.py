"""Garbage collection of processes that hold many documents."""

from __future__ import annotations

import gc

_OBJECTS = 50_000


def collect_rarely() -> None:
    """Look for reference cycles less often in this process.

    Preparation creates many lists and tuples and hardly any cycle. With Python's own threshold of 700 objects the
    search takes a sixth of its CPU time.
    """
    gc.set_threshold(_OBJECTS, 20, 20)
