"""Opened shard sets: their manifest, their indexes, and their tokens without a copy."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np

from data_prep.base.errors import UsageError, UserError
from data_prep.dataset.counts import read_token_counts
from data_prep.dataset.manifest import TOKENIZER_FOLDER, Manifest, read_manifest
from data_prep.dataset.manifest_records import ShardRecord
from data_prep.dataset.shard_index import ShardIndex, read_index
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import Tokenizer
from trainer.data.order import WINDOW_SHARDS
from trainer.data.prefetch import Prefetcher
from trainer.data.shard_cache import CachedFile, DamagedFile, ShardCache
from trainer.data.verified_files import is_sound

_CACHE_BYTES = 100_000_000_000
_COPY_BYTES = 8 << 20
_VERIFIED = ".verified"

Split = Literal["train", "valid"]


class ShardSet:
    """A data set that `read_manifest` accepted; shards are checked and mapped when they are first read."""

    def __init__(self, url: str, manifest: Manifest, cache_dir: Path | None, cache_bytes: int = _CACHE_BYTES) -> None:
        """Use `open_shard_set`."""
        self.url, self.manifest = url, manifest
        self._cache_dir = cache_dir or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clozeworks"
        self._cache = ShardCache(self._cache_dir, cache_bytes, _download)
        self._prefetcher = Prefetcher(self._cache) if storage.is_remote(url) else None
        self._records = {record.name: record for split in (manifest.train, manifest.valid) for record in split.shards}
        # Those of this window of the order and the next; the map of another is dropped, and with it its disk space.
        self._tokens_of = lru_cache(2 * WINDOW_SHARDS)(self._check_and_map)
        self._damaged: set[str] = set()

    @property
    def tokenizer_folder(self) -> str:
        """Path or URL of the tokenizer that the shards carry."""
        return storage.join(self.url, TOKENIZER_FOLDER)

    @property
    def token_dtype(self) -> np.dtype:
        return np.dtype(self.manifest.tokenizer.token_dtype)

    def shards(self, split: Split) -> list[Shard]:
        """The shards of a split that hold any document, in the manifest's order."""
        return [Shard(self, record) for record in self.manifest.split(split).shards if record.documents]

    def read_tokens(self, record: ShardRecord) -> np.ndarray:
        """The whole tar as (bytes / itemsize,) token ids, mapped; `ShardIndex.token_offsets` says where they are.

        Raises:
            DamagedFile: it is missing, or its size or sha256 is not the manifest's; looked at when it is first read.
            UserError: the store or the cache folder refuses.
        """
        return self._tokens_of(record.name)

    def is_readable(self, record: ShardRecord) -> bool:
        """Whether the shard is sound; the first time that one is not, it is named on standard error."""
        if record.name in self._damaged:
            return False
        try:
            self.read_tokens(record)
        except DamagedFile as error:
            print(f"warning: {error}; its rows are passed over and counted", file=sys.stderr, flush=True)
            self._damaged.add(record.name)
        return record.name not in self._damaged

    def prefetch(self, record: ShardRecord) -> None:
        """Have a remote shard fetched in the background, which will be needed soon."""
        if self._prefetcher is not None and record.name not in self._damaged:
            self._prefetcher.ask(self._file(record))

    def token_counts(self, split: Split) -> np.ndarray:
        """How often each token id stands in a split, (vocab_size,) int64.

        Raises:
            UserError: the file is not the one that the manifest names.
        """
        return read_token_counts(self.url, self.manifest)[split]

    def _check_and_map(self, name: str) -> np.ndarray:
        record = self._records[name]
        if self._prefetcher is not None:
            self._prefetcher.forget(self._file(record))
            return np.asarray(self._cache.map(self._file(record), self.token_dtype))
        path = storage.local_path(storage.join(self.url, name))
        remedy = "restore it, or make the shards again; 'python -m data_prep verify' checks them all"
        if not path.is_file():
            raise DamagedFile(f"shard {path} is missing; {remedy}")
        if path.stat().st_size != record.bytes:
            raise DamagedFile(
                f"shard {path} is damaged: it has {path.stat().st_size} bytes and the manifest says {record.bytes}; "
                f"{remedy}"
            )
        if not is_sound(path, record.sha256, self._cache_dir / _VERIFIED):
            raise DamagedFile(
                f"shard {path} is damaged: its sha256 is {storage.sha256_of(path)} and the manifest says "
                f"{record.sha256}; {remedy}"
            )
        # A plain array over the map: slices of np.memmap cost microseconds each.
        return np.asarray(np.memmap(path, self.token_dtype, mode="r"))

    def _file(self, record: ShardRecord) -> CachedFile:
        return CachedFile(storage.join(self.url, record.name), record.bytes, record.sha256)


@dataclass(frozen=True)
class Shard:
    """One shard of a shard set."""

    shard_set: ShardSet
    record: ShardRecord

    @property
    def itemsize(self) -> int:
        """Bytes of a token."""
        return self.shard_set.token_dtype.itemsize

    def read_index(self) -> ShardIndex:
        return read_index(self.shard_set.url, self.record)

    def read_tokens(self) -> np.ndarray:
        return self.shard_set.read_tokens(self.record)

    def is_readable(self) -> bool:
        return self.shard_set.is_readable(self.record)

    def prefetch(self) -> None:
        self.shard_set.prefetch(self.record)


def open_shard_set(
    url: str, cache_dir: str | Path | None = None, cache_bytes: int = _CACHE_BYTES, digest: str | None = None
) -> ShardSet:
    """Open the shard set at `url`; copies of remote shards are kept in `cache_dir`, of about `cache_bytes` in all.

    Args:
        digest: of the version to open; by default the current one.

    Raises:
        UserError: there is no manifest, or it is damaged or of another format.
        UnknownVersion: no version that is kept has that digest.
    """
    return ShardSet(url, read_manifest(url, digest), None if cache_dir is None else Path(cache_dir), cache_bytes)


def _download(url: str, path: Path) -> None:
    """Write the file at a URL to a local path.

    Raises:
        DamagedFile: there is none.
        UserError: it cannot be read.
        OSError: the path cannot be written.
    """
    if not storage.exists(url):
        raise DamagedFile(f"shard {storage.redact(url)} is missing; restore it, or make the shards again")
    with storage.open_read(url) as source, open(path, "wb") as target:
        shutil.copyfileobj(source, target, _COPY_BYTES)


def check_tokenizer(shard_sets: Sequence[ShardSet], tokenizer_folder: str | None, vocab_size: int) -> None:
    """Refuse shards whose ids mean something else than the tokenizer's, or lie beyond the model's embeddings.

    Args:
        tokenizer_folder: the run's own tokenizer; None takes the copy that the shards carry.
        vocab_size: `model.vocab_size`.

    Raises:
        UsageError: names both sides.
    """
    first = shard_sets[0]
    expected = first.manifest.tokenizer.fingerprint
    for other in shard_sets[1:]:
        if other.manifest.tokenizer.fingerprint != expected:
            raise UsageError(
                f"data.shards mixes tokenizers: {storage.redact(first.url)} has fingerprint {expected} and "
                f"{storage.redact(other.url)} has {other.manifest.tokenizer.fingerprint}; "
                "make the shards of all components with one tokenizer"
            )
    if tokenizer_folder is not None:
        found = Tokenizer.load(tokenizer_folder).fingerprint
        if found != expected:
            raise UsageError(
                f"data.tokenizer={tokenizer_folder} has fingerprint {found} and the shards {storage.redact(first.url)} "
                f"were made with {expected}; name that tokenizer, leave data.tokenizer out, or make the shards again"
            )
    needed = first.manifest.tokenizer.vocab_size
    if needed > vocab_size:
        raise UsageError(
            f"model.vocab_size={vocab_size} is less than the {needed} pieces of the tokenizer "
            f"of the shards {storage.redact(first.url)}; raise it to {needed}"
        )


def check_own_tokenizer(shard_set: ShardSet) -> None:
    """Refuse a shard set on a local disk whose copy of the tokenizer is not the one that made its ids.

    Raises:
        UserError: names both fingerprints.
    """
    if storage.is_remote(shard_set.url):
        return
    expected, found = shard_set.manifest.tokenizer.fingerprint, Tokenizer.load(shard_set.tokenizer_folder).fingerprint
    if found != expected:
        raise UserError(
            f"{shard_set.tokenizer_folder} has fingerprint {found} and the shards beside it were made with {expected}; "
            "put that tokenizer back, or make the shards again"
        )
