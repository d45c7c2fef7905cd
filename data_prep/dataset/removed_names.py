"""Removed URLs and corpus ids: 64-bit hashes beside the removed document ids; additions exclude them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import xxhash

from data_prep.base.errors import UserError
from data_prep.dataset.counts import read_tensors
from data_prep.dataset.manifest import Manifest
from data_prep.dataset.manifest_records import FileRecord
from data_prep.storage import storage

_URLS, _CORPUS_IDS = "url_hashes", "corpus_id_hashes"


class RemovedNames(NamedTuple):
    """Hashes of exact values, (n,) uint64 each, ascending and unique."""

    urls: np.ndarray
    corpus_ids: np.ndarray

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the non-empty arrays, as the file of a removal stores them."""
        named = {_URLS: self.urls, _CORPUS_IDS: self.corpus_ids}
        return {name: hashes for name, hashes in named.items() if len(hashes)}

    def without(self, others: RemovedNames) -> RemovedNames:
        """Return the hashes that `others` does not contain."""
        return RemovedNames(*(np.setdiff1d(mine, theirs) for mine, theirs in zip(self, others, strict=True)))


def name_hash(value: str) -> int:
    """Return the xxh3_64 of a URL or corpus id as written."""
    return xxhash.xxh3_64_intdigest(value.encode())


def hash_names(urls: Iterable[str] = (), corpus_ids: Iterable[str] = ()) -> RemovedNames:
    """Hash URLs and corpus ids."""
    return RemovedNames(*(np.unique(np.array([*map(name_hash, values)], np.uint64)) for values in (urls, corpus_ids)))


def files_of_removed_names(manifest: Manifest) -> tuple[FileRecord, ...]:
    """Return the files with removed URLs or corpus ids."""
    return tuple(item.ids for item in manifest.removals if item.ids is not None and item.urls + item.corpus_ids)


@functools.lru_cache(maxsize=1)
def removed_names(folder: str, files: tuple[FileRecord, ...]) -> RemovedNames:
    """Read the removed URLs and corpus ids of a data set, once in each process.

    Args:
        files: as `files_of_removed_names` returns them.

    Raises:
        UserError: a file is missing or damaged.
    """
    tensors = [(file, read_tensors(folder, file)) for file in files]

    def all_of(name: str) -> np.ndarray:
        return np.unique(np.concatenate([np.empty(0, np.uint64), *(_hashes(folder, *each, name) for each in tensors)]))

    return RemovedNames(all_of(_URLS), all_of(_CORPUS_IDS))


def _hashes(folder: str, file: FileRecord, tensors: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    found = tensors.get(name, np.empty(0, np.uint64))
    if found.ndim != 1 or found.dtype != np.uint64:
        where = storage.redact(storage.join(folder, file.name))
        raise UserError(f"{where} has no usable {name}", fix="restore it from a copy", code="damaged-removed-ids")
    return found
