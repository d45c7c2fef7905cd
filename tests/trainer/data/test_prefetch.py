from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest

from trainer.data.prefetch import Prefetcher
from trainer.data.shard_cache import CachedFile


class MarkingCache:
    """Leaves a mark for each file that it was to fetch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fetch(self, file: CachedFile, wait: bool = True) -> bool:
        (self.folder / file.name).touch()
        return True

    def wait_for(self, file: CachedFile) -> None:
        deadline = time.monotonic() + 60
        while not (self.folder / file.name).exists():
            assert time.monotonic() < deadline, f"{file.name} was not fetched"
            time.sleep(0.005)


def file_of(number: int) -> CachedFile:
    return CachedFile(f"store://here/{number}.tar", 1, f"{number:064x}")


def _ask(prefetcher: Prefetcher, cache: MarkingCache) -> None:
    prefetcher.ask(file_of(1))
    cache.wait_for(file_of(1))


@pytest.mark.spawn
def test_a_worker_fetches_ahead_though_its_rank_did_before_it_was_forked(tmp_path: Path) -> None:
    """As the rehearsal does before DataLoader forks its workers."""
    cache: Any = MarkingCache(tmp_path)
    prefetcher = Prefetcher(cache)
    prefetcher.ask(file_of(0))
    cache.wait_for(file_of(0))
    worker = multiprocessing.get_context("fork").Process(target=_ask, args=(prefetcher, cache))
    worker.start()
    worker.join(90)
    assert worker.exitcode == 0
