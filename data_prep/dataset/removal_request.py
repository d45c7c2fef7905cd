"""Removal requests, and the documents that they name: found in indexes and provenance sidecars, no shard is read."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from data_prep.base.errors import UsageError, UserError
from data_prep.base.progress import Progress
from data_prep.base.terminal import counted
from data_prep.base.urls import path_parts
from data_prep.dataset.manifest import Manifest
from data_prep.dataset.manifest_records import FileRecord, ShardRecord, read_inputs
from data_prep.dataset.provenance_sidecar import find_rows, read_provenance
from data_prep.dataset.removed_names import (
    RemovedNames,
    files_of_removed_names,
    hash_names,
    name_hash,
    not_present,
    removed_ids,
    removed_names,
)
from data_prep.dataset.shards import read_index
from data_prep.executors.executors import Executor, run_units
from data_prep.storage import storage

_SHARDS_AT_ONCE = 16  # whose indexes or sidecars one task searches


@dataclass(frozen=True)
class RemovalRequest:
    """A source by name, or documents by id.

    Attributes:
        ids: (n,) uint64 document ids, ascending and unique.
        absent: (m,) uint64 ids of dropped copies of these documents, ascending and unique; additions exclude them too.
        names: all listed URLs or corpus ids; additions exclude documents of them too.
        note: text for the manifest, such as who asked for the removal.
        not_present: (k,) uint64 hashes of those `names`, or those `ids`, that no document has, ascending and unique.
    """

    source: str | None = None
    ids: np.ndarray | None = None
    absent: np.ndarray | None = None
    note: str | None = None
    names: RemovedNames | None = None
    not_present: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))

    def __post_init__(self) -> None:
        assert (self.source is None) != (self.ids is None)

    def answered(self, found: Sequence[Found]) -> RemovalRequest:
        """Return the request with the listed document ids that are not among the found documents."""
        if self.ids is None or self.names is not None:
            return self
        return dataclasses.replace(self, not_present=np.setdiff1d(self.ids, ids_of(found)))

    @property
    def description(self) -> dict[str, str | None]:
        """Plain values that are equal for requests of the same documents."""
        ids = self.excluded_ids
        described = {
            "source": self.source,
            "ids_sha256": None if ids is None else hashlib.sha256(ids.tobytes()).hexdigest(),
        }
        if self.names is not None:
            named = b"".join(hashes.tobytes() for hashes in self.names)
            described["names_sha256"] = hashlib.sha256(named).hexdigest()
        return described

    @property
    def excluded_ids(self) -> np.ndarray | None:
        """All ids that later additions exclude, (k,) uint64, ascending and unique; None for a source."""
        if self.ids is None or self.absent is None:
            return self.ids
        return np.union1d(self.ids, self.absent)

    def __str__(self) -> str:
        return f"source {self.source!r}" if self.ids is None else counted(len(self.ids), "document")


@dataclass(frozen=True)
class Found:
    """The documents of a shard that a request names.

    Attributes:
        numbers: (n,) int64 numbers of the documents in the shard, ascending.
        ids: (n,) uint64 ids of these documents.
        num_tokens: tokens of these documents.
    """

    shard: ShardRecord
    numbers: np.ndarray
    ids: np.ndarray
    num_tokens: int


class ListedDocuments(NamedTuple):
    """The documents that a list of ids or URLs names.

    Attributes:
        ids: (n,) uint64 ids under which the data set keeps their texts, ascending and unique.
        absent: (m,) uint64 ids of dropped copies, which the data set does not hold, ascending and unique.
        num_listed: different values in the list.
        num_found: how many of them the provenance names.
        names: hashes of all of them.
        removed: values that it does not name and whose documents were removed before.
        unknown: all other values that it does not name; both in the order of the list.
        shared: values that name documents of several sources, and the names of the sources, ascending.
        unnamed: names of the sources with documents of which none has such a value at all.
    """

    ids: np.ndarray
    absent: np.ndarray
    num_listed: int
    num_found: int
    names: RemovedNames
    removed: tuple[str, ...]
    unknown: tuple[str, ...]
    shared: Mapping[str, Sequence[str]] = {}
    unnamed: tuple[str, ...] = ()

    def request(self, note: str | None = None) -> RemovalRequest:
        """Return the request to remove the documents and to remember all listed values."""
        absent = np.unique(np.array([*map(name_hash, self.unknown)], np.uint64))
        return RemovalRequest(ids=self.ids, absent=self.absent, note=note, names=self.names, not_present=absent)


@dataclass(frozen=True)
class _SearchTask:
    """Sidecars to search for values, which travel with every task; some are names of input files."""

    folder: str
    files: tuple[FileRecord, ...]
    column: Literal["id", "url"]
    values: tuple[str, ...]
    file_names: tuple[str, ...]


@dataclass(frozen=True)
class _IndexSearch:
    """Consecutive shards from the one of number `first`, in whose indexes a source or ids are searched."""

    first: int
    folder: str
    shards: tuple[ShardRecord, ...]
    source: int | None
    ids: np.ndarray | None


def _input_names(folder: str, manifest: Manifest, values: Iterable[str]) -> set[str]:
    """Return those of the values that name an input file, from any of its folders on."""
    wanted, found = set(values), set[str]()
    for file in read_inputs(folder, manifest.inputs):
        parts = path_parts(file.url)
        found.update(wanted.intersection("/".join(parts[first:]) for first in range(len(parts))))
    return found


def find_listed(
    folder: str, manifest: Manifest, column: Literal["id", "url"], values: Sequence[str], executor: Executor | int = 1
) -> ListedDocuments:
    """Find the documents whose provenance has one of these ids or URLs, dropped copies included.

    The name of an input file finds all documents that it names. Reads every sidecar once, and no shard.
    """
    if not manifest.provenance_files:
        setting = f"documents.{column}_field"
        raise UserError(
            f"{storage.redact(folder)} has no provenance: it was prepared without {setting}",
            fix=f"rebuild it with {setting}, or name documents by the document ids that 'inspect' shows",
            code="missing-provenance",
        )
    wanted = tuple(sorted(set(values)))
    files = manifest.provenance_files
    file_names = tuple(sorted(_input_names(folder, manifest, wanted))) if column == "id" else ()
    tasks = [
        _SearchTask(folder, files[first : first + _SHARDS_AT_ONCE], column, wanted, file_names)
        for first in range(0, len(files), _SHARDS_AT_ONCE)
    ]
    kept, own = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
    found: dict[str, set[str]] = {}
    named = set[str]()
    with Progress("searching provenance", sum(file.bytes for file in files), "MB", 1e6) as progress:
        for task, (kept_as, document_ids, matched, of_sources) in run_units(_search_sidecars, tasks, executor):
            kept.append(kept_as)
            own.append(document_ids)
            named |= of_sources
            for value, source in matched:
                found.setdefault(value, set()).add(source)
            progress.add(sum(file.bytes for file in task.files))
    ids = np.unique(np.concatenate(kept))
    missing = [value for value in dict.fromkeys(values) if value not in found]
    earlier, kind = removed_names(folder, files_of_removed_names(manifest)), "URL" if column == "url" else "corpus id"
    hashes = set((earlier.urls if column == "url" else earlier.corpus_ids).tolist())
    hashes -= set(not_present(folder, manifest, kind).tolist())
    return ListedDocuments(
        ids,
        np.setdiff1d(np.concatenate(own), ids),
        len(wanted),
        len(found),
        hash_names(urls=wanted) if column == "url" else hash_names(corpus_ids=wanted),
        tuple(value for value in missing if name_hash(value) in hashes),
        tuple(value for value in missing if name_hash(value) not in hashes),
        {value: sorted(found[value]) for value in wanted if len(found.get(value, ())) > 1},
        tuple(source.name for source in manifest.sources if source.documents and source.name not in named),
    )


def find_documents(
    folder: str, manifest: Manifest, request: RemovalRequest, executor: Executor | int = 1
) -> list[Found] | None:
    """Return the documents of the request by shard, in the order of the manifest; None if nothing of it is new."""
    if request.source is not None:
        number = source_number(folder, manifest, request.source)
        is_gone = request.source in manifest.removed_sources
        return None if is_gone else _search(folder, manifest, number, None, executor)
    assert request.ids is not None
    removed = removed_ids(folder, manifest)
    wanted = np.setdiff1d(request.ids, removed, assume_unique=True)
    if len(wanted):
        return _search(folder, manifest, None, wanted, executor)
    is_new = request.absent is not None and len(np.setdiff1d(request.absent, removed, assume_unique=True)) > 0
    if request.names is not None:
        new = request.names.without(removed_names(folder, files_of_removed_names(manifest)))
        is_new |= any(map(len, new))
    return [] if is_new else None


def find_document_ids(
    folder: str, manifest: Manifest, ids: np.ndarray, executor: Executor | int = 1
) -> ListedDocuments:
    """Find the documents of these document ids, (n,) uint64 ascending and unique."""
    removed = np.setdiff1d(removed_ids(folder, manifest), not_present(folder, manifest, "document id"))
    left = np.setdiff1d(ids, removed, assume_unique=True)
    found = ids_of(_search(folder, manifest, None, left, executor) if len(left) else [])
    gone, absent = (
        tuple(f"{document:016x}" for document in each) for each in (np.setdiff1d(ids, left), np.setdiff1d(left, found))
    )
    return ListedDocuments(found, np.empty(0, np.uint64), len(ids), len(found), hash_names(), gone, absent)


def ids_of(found: Sequence[Found]) -> np.ndarray:
    """Return the ids of found documents, (n,) uint64, ascending and unique."""
    return np.unique(np.concatenate([np.empty(0, np.uint64), *(part.ids for part in found)]))


def _search_sidecars(task: _SearchTask) -> tuple[np.ndarray, np.ndarray, set[tuple[str, str]], set[str]]:
    """Return the ids under which matching rows are kept, their own ids, the matched values with their source, and the
    sources with any value."""
    kept, own, found = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)], set[tuple[str, str]]()
    named = set[str]()
    for file in task.files:
        table = read_provenance(task.folder, file)
        named |= set(table.filter(table[task.column].is_valid())["source"].unique().to_pylist())
        rows = find_rows(table, task.column, task.values, task.file_names)
        kept.append(rows["kept_as"].drop_null().to_numpy().astype(np.uint64))
        own.append(rows["document_id"].to_numpy().astype(np.uint64))
        found |= set(zip(rows[task.column].to_pylist(), rows["source"].to_pylist(), strict=True))
    return np.concatenate(kept), np.concatenate(own), found, named


def source_number(folder: str, manifest: Manifest, name: str) -> int:
    """Return the number of a source in the manifest."""
    names = [source.name for source in manifest.sources]
    if name not in names:
        known = ", ".join(repr(source.name) for source in manifest.sources if source.documents)
        raise UsageError(
            f"{storage.redact(folder)} has no source {name!r}", fix=f"give one of {known}", code="unknown-source"
        )
    return names.index(name)


def _search(
    folder: str, manifest: Manifest, source: int | None, ids: np.ndarray | None, executor: Executor | int
) -> list[Found]:
    shards = manifest.shards
    tasks = [
        _IndexSearch(first, folder, shards[first : first + _SHARDS_AT_ONCE], source, ids)
        for first in range(0, len(shards), _SHARDS_AT_ONCE)
    ]
    found: dict[int, list[Found]] = {}
    with Progress("searching indexes", sum(shard.index.bytes for shard in shards), "MB", 1e6) as progress:
        for task, of_shards in run_units(_search_indexes, tasks, executor):
            found[task.first] = of_shards
            progress.add(sum(shard.index.bytes for shard in task.shards))
    return [each for first in sorted(found) for each in found[first]]


def _search_indexes(task: _IndexSearch) -> list[Found]:
    found = []
    for shard in task.shards:
        index = read_index(task.folder, shard)
        mine = index.document_sources == task.source if task.ids is None else np.isin(index.document_ids, task.ids)
        if mine.any():
            num_tokens = int(index.document_lengths[mine].sum(dtype=np.int64))
            found.append(Found(shard, np.flatnonzero(mine), index.document_ids[mine], num_tokens))
    return found
