"""Opened data sets: manifest, indexes, and tokens as memory maps."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from shlex import quote
from typing import Literal

import numpy as np

from data_prep.base.errors import UsageError, UserError
from data_prep.base.logs import logger
from data_prep.dataset.counts import read_token_counts
from data_prep.dataset.manifest import MANIFEST_NAME, TOKENIZER_FOLDER, Manifest, read_manifest
from data_prep.dataset.manifest_records import ShardRecord
from data_prep.dataset.missing_data_set import PLAN_NAME, holds_tokenizer, is_text_file, tokenizer_instead_of_shards
from data_prep.dataset.shards import ShardIndex, read_index
from data_prep.storage import storage
from data_prep.storage.hub import download_from_hub, hub_name
from data_prep.tokenizer.tokenizer import Tokenizer
from trainer.data.shard_cache import CachedFile, DamagedFile, Prefetcher, ShardCache, is_sound

LOG = logger(__name__)

WINDOW_SHARDS = 16
"""Shards whose rows the sample order mixes (`trainer/data/order.py`)."""
_CACHE_BYTES = 100_000_000_000
_COPY_BYTES = 8 << 20
_VERIFIED = ".verified"

Split = Literal["train", "valid"]


class ShardSet:
    """A data set; shards are verified and mapped when they are first read."""

    def __init__(self, url: str, manifest: Manifest, cache_dir: Path | None, cache_bytes: int = _CACHE_BYTES) -> None:
        """Use `open_shard_set`."""
        self.url, self.manifest = url, manifest
        self._cache_dir = cache_dir or storage.cache_folder()
        self._cache = ShardCache(self._cache_dir, cache_bytes, _download)
        self._is_remote = storage.is_remote(url)
        self._prefetcher = Prefetcher(partial(self._cache.fetch, wait=False) if self._is_remote else self._verify_ahead)
        self._records = {record.name: record for split in (manifest.train, manifest.valid) for record in split.shards}
        # Maps of this window of the sample order and the next; closing the others frees their disk space.
        self._tokens_of = lru_cache(2 * WINDOW_SHARDS)(self._check_and_map)
        self._damaged: set[str] = set()

    @property
    def tokenizer_folder(self) -> str:
        """Path or URL of the copy of the tokenizer beside the shards."""
        return storage.join(self.url, TOKENIZER_FOLDER)

    @property
    def token_dtype(self) -> np.dtype:
        return np.dtype(self.manifest.tokenizer.token_dtype)

    def shards(self, split: Split) -> list[Shard]:
        """Return the non-empty shards of a split, in the order of the manifest."""
        return [Shard(self, record) for record in self.manifest.split(split).shards if record.documents]

    def read_tokens(self, record: ShardRecord) -> np.ndarray:
        """Map the whole tar as (bytes / itemsize,) token ids; `ShardIndex.token_offsets` has the positions of records.

        Raises:
            DamagedFile: it is missing, or size or sha256 differ from the manifest; checked at the first read.
            UserError: the storage or the cache directory is unusable.
        """
        return self._tokens_of(record.name)

    @property
    def damaged(self) -> frozenset[str]:
        """Names of shards that could not be read, here or on another rank."""
        return frozenset(self._damaged)

    def note_damaged(self, names: Iterable[str]) -> None:
        """Skip these shards too, because another rank could not read them."""
        self._damaged.update(names)

    def is_readable(self, record: ShardRecord) -> bool:
        """Return whether the shard is intact; warn the first time that it is not."""
        if record.name in self._damaged:
            return False
        try:
            self.read_tokens(record)
        except DamagedFile as error:
            LOG.warning(f"{error.problem}; its rows are skipped and counted")
            self._damaged.add(record.name)
        return record.name not in self._damaged

    def prefetch(self, record: ShardRecord) -> None:
        """Download a remote shard, or verify a local one, in the background."""
        if record.name not in self._damaged:
            self._prefetcher.ask(self._file(record))

    def token_counts(self, split: Split) -> np.ndarray:
        """Return the frequency of each token id in a split, (vocab_size,) int64.

        Raises:
            UserError: the file is not the one in the manifest.
        """
        return read_token_counts(self.url, self.manifest)[split]

    def _check_and_map(self, name: str) -> np.ndarray:
        record = self._records[name]
        if self._is_remote:
            self._prefetcher.forget(self._file(record))
            return np.asarray(self._cache.map(self._file(record), self.token_dtype))
        path = storage.local_path(storage.join(self.url, name))
        fix = "restore it, or prepare the text again; `clozeworks verify` checks all shards"
        if not path.is_file():
            raise DamagedFile(f"shard {path} is missing", fix=fix, code="missing-shard")
        if path.stat().st_size != record.bytes:
            raise DamagedFile(
                f"shard {path} is damaged: it has {path.stat().st_size} bytes, and {record.bytes} in the manifest",
                fix=fix,
                code="damaged-shard",
            )
        if not is_sound(path, record.sha256, self._cache_dir / _VERIFIED):
            raise DamagedFile(
                f"shard {path} is damaged: sha256 {storage.sha256_of(path)}, and {record.sha256} in the manifest",
                fix=fix,
                code="damaged-shard",
            )
        # A plain array over the map: slices of np.memmap cost microseconds each.
        return np.asarray(np.memmap(path, self.token_dtype, mode="r"))

    def _verify_ahead(self, file: CachedFile) -> None:
        is_sound(storage.local_path(file.url), file.sha256, self._cache_dir / _VERIFIED, wait=False)

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


def has_valid_split(shard_sets: Sequence[ShardSet]) -> bool:
    """Return whether any data set has a valid split; without one a run does not evaluate."""
    return any(shard_set.manifest.valid.documents for shard_set in shard_sets)


def check_is_data_set(url: str) -> None:
    """Check that a local path can be a data set, before its manifest is looked for.

    Raises:
        UsageError: it does not exist, or is a tokenizer or raw text; the fix has the commands that prepare it.
    """
    if storage.is_remote(url):
        return
    path = storage.local_path(url)
    if not path.exists():
        raise UsageError(
            f"data.shards={url} does not exist",
            fix="correct the path, or prepare it with `clozeworks shards --output "
            f"{quote(url)} --tokenizer TOKENIZER --input TEXT`",
            code="missing-path",
        )
    if (path / MANIFEST_NAME).exists():
        return
    names = sorted(each.name for each in path.iterdir()) if path.is_dir() else []
    if holds_tokenizer(names):
        raise tokenizer_instead_of_shards(f"data.shards={url}")
    text = str(path) if path.is_file() and is_text_file(path.name) else None
    if PLAN_NAME in names:
        return  # an unfinished preparation, which reading the manifest explains
    if text_files := [name for name in names if is_text_file(name)]:
        suffix = "." + text_files[0].partition(".")[2] if "." in text_files[0] else ""
        text = f"{path}/*{suffix}"
    if text is not None:
        raise UsageError(
            f"data.shards={url} is raw text, not prepared shards",
            fix=f"run `clozeworks tokenizer --input {quote(text)} --output data/tokenizer` and `clozeworks "
            f"shards --input {quote(text)} --tokenizer data/tokenizer --output data/shards`, then set "
            "data.shards=data/shards",
            code="text-instead-of-shards",
        )


def open_shard_set(
    url: str, cache_dir: str | Path | None = None, cache_bytes: int = _CACHE_BYTES, digest: str | None = None
) -> ShardSet:
    """Open the data set at `url`; copies of remote shards are kept in `cache_dir`, about `cache_bytes` in total.

    Args:
        digest: of the version to open; by default the current one.

    Raises:
        UserError: the path is missing or raw text, or the manifest is missing, damaged or of another format.
        UnknownVersion: no version has that digest.
    """
    check_is_data_set(url)
    return ShardSet(url, read_manifest(url, digest), None if cache_dir is None else Path(cache_dir), cache_bytes)


def _download(url: str, path: Path) -> None:
    """Write the file at a URL to a local path.

    Raises:
        DamagedFile: there is none.
        UserError: it cannot be read.
        OSError: the path cannot be written.
    """
    if not storage.exists(url):
        raise DamagedFile(
            f"shard {storage.redact(url)} is missing", fix="restore it, or prepare the text again", code="missing-shard"
        )
    with storage.open_read(url) as source, open(path, "wb") as target:
        shutil.copyfileobj(source, target, _COPY_BYTES)


def check_tokenizer(shard_sets: Sequence[ShardSet], tokenizer: str | None, vocab_size: int) -> None:
    """Check that all shards were made with the run's tokenizer, and that the model has embeddings for its tokens.

    Args:
        tokenizer: `data.tokenizer`: a folder, a URL or a name on the Hub; None uses the copy beside the shards.
        vocab_size: `model.vocab_size`.

    Raises:
        UsageError: they differ; states both sides.
    """
    first = shard_sets[0]
    expected = first.manifest.tokenizer.fingerprint
    for other in shard_sets[1:]:
        theirs = other.manifest.tokenizer.fingerprint
        if theirs != expected and not open_tokenizer(None, first).is_named(theirs):
            raise UsageError(
                f"data.shards mixes tokenizers: {storage.redact(first.url)} has fingerprint {expected} and "
                f"{storage.redact(other.url)} has {theirs}",
                fix="prepare all components with one tokenizer",
                code="mixed-tokenizers",
            )
    if tokenizer is not None:
        given = open_tokenizer(tokenizer, first)
        if not given.is_named(expected):
            raise UsageError(
                f"data.tokenizer={tokenizer} has fingerprint {given.fingerprint} and the shards "
                f"{storage.redact(first.url)} were made with {expected}",
                fix="remove data.tokenizer (the shards contain their tokenizer), or prepare the text again",
                code="another-tokenizer",
            )
    needed = first.manifest.tokenizer.vocab_size
    if needed > vocab_size:
        raise UsageError(
            f"model.vocab_size={vocab_size} is less than the {needed} tokens of the tokenizer "
            f"of the shards {storage.redact(first.url)}",
            fix=f"set model.vocab_size={needed}",
            code="vocabulary-too-small",
        )


def open_tokenizer(tokenizer: str | None, shard_set: ShardSet) -> Tokenizer:
    """Return the tokenizer of a run; see `tokenizer_of_run`."""
    return Tokenizer.load(tokenizer_of_run(tokenizer, shard_set))


def check_pairs(shard_set: ShardSet, tokenizer: str | None) -> None:
    """Check that the tokenizer joins two texts as rows of sentence pairs do, so that an exported model gets such pairs.

    Args:
        tokenizer: `data.tokenizer`, as above.

    Raises:
        UsageError: it writes two [SEP] between them.
    """
    loaded = Tokenizer.load(tokenizer_of_run(tokenizer, shard_set))
    if loaded.pair_separators != 1:
        name = loaded.pieces[loaded.special_tokens.sep]
        raise UsageError(
            f"the tokenizer of the shards {storage.redact(shard_set.url)} joins two texts by {name} {name}, and a row "
            "of sentence pairs has one separator",
            fix="set data.sentence_pairs=none, or prepare the text with another tokenizer",
            code="two-separators-in-pairs",
        )


def tokenizer_of_run(tokenizer: str | None, shard_set: ShardSet) -> str:
    """Return the folder of a run's tokenizer; a name on the Hugging Face Hub is downloaded.

    Args:
        tokenizer: `data.tokenizer`; None uses the copy beside the shards.

    Raises:
        UsageError: it does not exist, or the Hub cannot be reached; the fix is the exact command.
    """
    if tokenizer is None:
        return shard_set.tokenizer_folder
    if storage.is_remote(tokenizer) or Path(tokenizer).exists():
        return tokenizer
    if hub_name(tokenizer) is None:
        raise UsageError(
            f"data.tokenizer={tokenizer} does not exist",
            fix="remove data.tokenizer (the shards contain their tokenizer), or correct the path",
            code="missing-path",
        )
    return str(download_from_hub(tokenizer, with_weights=False))


def check_own_tokenizer(shard_set: ShardSet) -> None:
    """Check that a local data set's copy of the tokenizer is the one that made its token ids.

    Raises:
        UserError: the fingerprints differ.
    """
    if storage.is_remote(shard_set.url):
        return
    expected, tokenizer = shard_set.manifest.tokenizer.fingerprint, Tokenizer.load(shard_set.tokenizer_folder)
    if not tokenizer.is_named(expected):
        raise UserError(
            f"{shard_set.tokenizer_folder} has fingerprint {tokenizer.fingerprint} and its shards were made with "
            f"{expected}",
            fix="restore that tokenizer, or prepare the text again",
            code="tokenizer-mismatch",
        )
