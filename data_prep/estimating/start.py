"""How long a preparation takes before its work begins, measured on this machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

from data_prep.preparing.executors import ProcessEngine
from data_prep.preparing.mapping import cached_tokenizer
from data_prep.preparing.plan import absolute
from data_prep.tokenizing.tokenizer import Tokenizer


def measure_start(tokenizer: Tokenizer, num_workers: int) -> float:
    """Seconds from the start of this process to the end of its planning, and those that its workers take to start."""
    so_far = _process_seconds()
    if num_workers == 1:
        return so_far
    started_at = time.perf_counter()
    task = absolute(tokenizer.url), tokenizer.fingerprint
    with ProcessEngine(num_workers) as pool:
        list(pool.run(_start, [task] * num_workers))
        return so_far + time.perf_counter() - started_at


def _start(task: tuple[str, str]) -> None:
    cached_tokenizer(*task)


def _process_seconds() -> float:
    try:
        started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):  # not Linux: what it has computed
        return time.process_time()
