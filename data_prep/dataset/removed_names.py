"""Names of takedowns: 64-bit hashes of URLs and corpus ids beside the removed document ids; additions exclude them.

Every listed name is remembered, also one that no document of the data set had when it was listed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import xxhash

from data_prep.base.errors import UserError
from data_prep.dataset.counts import read_tensors
from data_prep.dataset.manifest import Manifest
from data_prep.dataset.manifest_records import FileRecord, RemovalRecord
from data_prep.documents.document import Document
from data_prep.storage import storage
from data_prep.text.cleaning import replace_surrogates

NOT_PRESENT = "not_present"
"""Tensor of a removal: the hashes of its names, or its document ids, that no document had."""

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
    """Return the xxh3_64 of a URL or corpus id as the provenance holds it: as written, without lone surrogates."""
    return xxhash.xxh3_64_intdigest(replace_surrogates(value).encode())


def hash_names(urls: Iterable[str] = (), corpus_ids: Iterable[str] = ()) -> RemovedNames:
    """Hash URLs and corpus ids."""
    return RemovedNames(*(np.unique(np.array([*map(name_hash, values)], np.uint64)) for values in (urls, corpus_ids)))


def files_of_removed_names(manifest: Manifest) -> tuple[FileRecord, ...]:
    """Return the files with removed URLs or corpus ids."""
    return tuple(item.ids for item in manifest.removals if item.ids is not None and item.urls + item.corpus_ids)


def not_present(folder: str, manifest: Manifest, kind: str) -> np.ndarray:
    """Return the names, or document ids, of this `RemovalRecord.kind` that no document had when they were listed, (n,)
    uint64, ascending and unique.

    Raises:
        UserError: a file is missing or damaged.
    """

    def of_kind(item: RemovalRecord) -> bool:
        return item.ids is not None and item.not_present > 0 and item.kind == kind

    files = [item.ids for item in manifest.removals if of_kind(item)]
    parts = [_hashes(folder, file, read_tensors(folder, file), NOT_PRESENT) for file in files if file is not None]
    return np.unique(np.concatenate([np.empty(0, np.uint64), *parts]))


class ExcludedNames:
    """The names that an addition leaves out, for many look-ups.

    Attributes:
        dropped: number of documents that `excludes` found.
    """

    def __init__(self, names: RemovedNames) -> None:
        self._urls, self._corpus_ids = set(names.urls.tolist()), set(names.corpus_ids.tolist())
        self.dropped = 0

    def excludes(self, document: Document, file_name: str) -> bool:
        """Return whether a takedown has the URL or corpus id of the document, or names its file; count it."""
        names = [] if document.id is None else [document.id]
        if document.id is not None and document.id.startswith(f"{file_name}#"):
            names.append(file_name)  # one of several documents of the file
        found = (document.url is not None and name_hash(document.url) in self._urls) or any(
            name_hash(name) in self._corpus_ids for name in names
        )
        self.dropped += found
        return found


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
