"""Prefetch of remote shards, in a thread of the process that builds batches."""

from __future__ import annotations

import queue
import threading

from data_prep.base.errors import UserError
from trainer.data.shard_cache import CachedFile, ShardCache


class Prefetcher:
    """Prefetcher of files in the order of requests; it skips files that another process is fetching."""

    def __init__(self, cache: ShardCache) -> None:
        self._cache = cache
        self._waiting: queue.SimpleQueue[CachedFile] = queue.SimpleQueue()
        self._asked: set[str] = set()
        self._thread: threading.Thread | None = None

    def ask(self, file: CachedFile) -> None:
        """Request a file; a file that was requested before is not fetched again."""
        if file.name in self._asked:
            return
        self._asked.add(file.name)
        self._waiting.put(file)
        # Forked workers of DataLoader do not inherit the thread, which the warmup step starts before the fork.
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
            self._thread.start()

    def forget(self, file: CachedFile) -> None:
        """Allow new requests for a file after its use, because the cache may have removed it by then."""
        self._asked.discard(file.name)

    def _run(self) -> None:
        while True:
            file = self._waiting.get()
            try:
                self._cache.fetch(file, wait=False)
            except UserError:
                # The batch that needs the file fetches it again and raises the error.
                self.forget(file)
