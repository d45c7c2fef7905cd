"""The server that worker processes are forked from: it imports what they need, once for all of them.

Little is imported here, so that a command can have it started before it is imported itself.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import re
import warnings
from collections.abc import Sequence

START_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
# Not forked from the command's process: one that has threads (tokenizer, tqdm) may hang in its child.

_PRELOADED = ["data_prep.pipeline.map_task", "data_prep.pipeline.reduce_task"]
_WITH_WORKERS = ("shards", "merge")
_WITHOUT_WORKERS = re.compile(r" (-h|--help|--workers[ =]1|--executor[ =]dask) ")


def needs_workers(words: Sequence[str]) -> bool:
    """Whether the command of this line will want processes, at a glance: a server started in vain does no harm."""
    in_vain = _WITHOUT_WORKERS.search(f" {' '.join(words)} ") is not None or default_num_workers() == 1
    return bool(words) and words[0] in _WITH_WORKERS and not in_vain


def start_worker_server() -> None:
    """Have the server import what workers need, while this process does something else; again, nothing happens."""
    # Its tracker, killed, is started again whenever a process is; nothing of ours is tracked, so nothing leaks.
    warnings.filterwarnings("ignore", "resource_tracker: process died unexpectedly", UserWarning)
    if START_METHOD == "forkserver":
        multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
        multiprocessing.forkserver.ensure_running()


def default_num_workers() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
