"""Opened shard sets: their manifest, their indexes, and their tokens without a copy."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import safetensors.numpy

from data_prep import storage
from data_prep.errors import UsageError, UserError
from data_prep.manifest import TOKENIZER_FOLDER, Manifest, ShardRecord, read_manifest
from data_prep.shards import ShardIndex, read_index
from data_prep.tokenizer import Tokenizer

Split = Literal["train", "valid"]


@dataclass
class ShardSet:
    """A data set that `read_manifest` accepted; shards are checked and mapped when they are first read."""

    url: str
    manifest: Manifest
    cache_dir: Path | None = None
    _mapped: dict[str, np.ndarray] = field(default_factory=dict, repr=False)

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
            UserError: its size or sha256 is not the manifest's; looked at when this process first reads it.
        """
        if record.name not in self._mapped:
            self._mapped[record.name] = self._check_and_map(record)
        return self._mapped[record.name]

    def token_counts(self, split: Split) -> np.ndarray:
        """How often each token id stands in a split, (vocab_size,) int64.

        Raises:
            UserError: the file is not the one that the manifest names.
        """
        record = self.manifest.token_counts
        url = storage.join(self.url, record.name)
        data = storage.read_bytes(url)
        if hashlib.sha256(data).hexdigest() != record.sha256:
            raise UserError(
                f"{storage.redact(url)} is damaged: its sha256 is not the manifest's; "
                "restore it, or make the shards again"
            )
        return safetensors.numpy.load(data)[split]

    def _check_and_map(self, record: ShardRecord) -> np.ndarray:
        url = storage.join(self.url, record.name)
        path = storage.local_copy(url, self.cache_dir, record.sha256)
        remedy = "restore it, or make the shards again; 'python -m data_prep verify' checks them all"
        if path.stat().st_size != record.bytes:
            raise UserError(
                f"shard {storage.redact(url)} is damaged: it has {path.stat().st_size} bytes "
                f"and the manifest says {record.bytes}; {remedy}"
            )
        found = storage.sha256_of(path)
        if found != record.sha256:
            raise UserError(
                f"shard {storage.redact(url)} is damaged: its sha256 is {found} "
                f"and the manifest says {record.sha256}; {remedy}"
            )
        # A plain array over the map: slices of np.memmap cost microseconds each.
        return np.asarray(np.memmap(path, self.token_dtype, mode="r"))


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


def open_shard_set(url: str, cache_dir: str | Path | None = None) -> ShardSet:
    """Open the shard set at `url`; copies of remote shards are kept in `cache_dir`.

    Raises:
        UserError: there is no manifest, or it is damaged or of another format.
    """
    return ShardSet(url, read_manifest(url), None if cache_dir is None else Path(cache_dir))


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
