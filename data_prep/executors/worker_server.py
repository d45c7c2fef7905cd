"""The fork server of the worker processes, which imports what they need once for all of them.

This module imports little, so that a command can start the server before its own imports.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import re
import sys
import warnings
from collections.abc import Sequence

START_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
# Not forked from the command's process: its threads (tokenizer, tqdm) may leave a child hanging.

_PACKAGE = __name__.partition(".")[0]
_WITH_WORKERS = ("shards", "merge")
_WITHOUT_WORKERS = re.compile(r" (-h|--help|--workers[ =]1|--executor[ =](?!process )\S+) ")


def needs_workers(words: Sequence[str]) -> bool:
    """Guess whether this command line will use several processes; a server started in vain does no harm."""
    in_vain = _WITHOUT_WORKERS.search(f" {' '.join(words)} ") is not None or default_num_workers() == 1
    return bool(words) and words[0] in _WITH_WORKERS and not in_vain


def start_worker_server(module: str | None = None) -> None:
    """Start the server and its imports while this process continues; a second call does nothing.

    Args:
        module: what the server imports; by default the modules of this package that this process has imported.
    """
    # A killed resource tracker restarts with the next process; it tracks nothing of ours, so nothing leaks.
    warnings.filterwarnings("ignore", "resource_tracker: process died unexpectedly", UserWarning)
    if START_METHOD == "forkserver":
        imported = [module] if module else sorted(name for name in sys.modules if name.startswith(f"{_PACKAGE}."))
        multiprocessing.get_context("forkserver").set_forkserver_preload(imported)
        multiprocessing.forkserver.ensure_running()


def default_num_workers() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
