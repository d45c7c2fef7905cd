"""Fetching remote shards ahead of their use, in a thread of the process that builds batches."""

from __future__ import annotations

import queue
import threading

from data_prep.base.errors import UserError
from trainer.data.shard_cache import CachedFile, ShardCache


class Prefetcher:
    """Fetches files in the order in which they were asked for; what another process fetches already is passed over."""

    def __init__(self, cache: ShardCache) -> None:
        self._cache = cache
        self._waiting: queue.SimpleQueue[CachedFile] = queue.SimpleQueue()
        self._asked: set[str] = set()
        self._thread: threading.Thread | None = None

    def ask(self, file: CachedFile) -> None:
        """Have the file fetched some time soon; a file that was asked for before is not fetched again."""
        if file.name in self._asked:
            return
        self._asked.add(file.name)
        self._waiting.put(file)
        # A thread does not come along when DataLoader forks its workers, and the run's rehearsal begins one before.
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
            self._thread.start()

    def forget(self, file: CachedFile) -> None:
        """Let the file be asked for again, after its use: by then it may have made room for others."""
        self._asked.discard(file.name)

    def _run(self) -> None:
        while True:
            file = self._waiting.get()
            try:
                self._cache.fetch(file, wait=False)
            except UserError:
                # The batch that needs the file will fetch it itself, and meets the error where it can be told.
                self.forget(file)
