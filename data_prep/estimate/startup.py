"""How long a preparation takes before its work begins, measured on this machine."""

from __future__ import annotations

import time

import psutil

from data_prep.executors.process_executor import ProcessExecutor
from data_prep.pipeline.map_task import cached_tokenizer
from data_prep.pipeline.plan import absolute
from data_prep.tokenizer.tokenizer import Tokenizer


def measure_start(tokenizer: Tokenizer, num_workers: int) -> float:
    """Seconds from the start of this process to the end of its planning, and those that its workers take to start."""
    so_far = time.time() - psutil.Process().create_time()
    if num_workers == 1:
        return so_far
    started_at = time.perf_counter()
    task = absolute(tokenizer.url), tokenizer.fingerprint
    with ProcessExecutor(num_workers) as pool:
        list(pool.run(_start, [task] * num_workers))
        return so_far + time.perf_counter() - started_at


def _start(task: tuple[str, str]) -> None:
    cached_tokenizer(*task)
