"""Garbage collection of processes that hold many documents or modules."""

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


def exempt_what_is_loaded() -> None:
    """Exempt what exists by now from the search for reference cycles, unless something is exempt already.

    Call it before a model is made: DeepSpeed searches at every stage of a start in bf16, and torch, DeepSpeed and
    MLflow are a million objects. What is made later, a model and its engine too, stays collectable.
    """
    if not gc.get_freeze_count():
        gc.freeze()
