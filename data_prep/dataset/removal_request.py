"""Removal requests, and the documents that they name: found in indexes and provenance sidecars, no shard is read."""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from data_prep.base.errors import UsageError, UserError
from data_prep.base.logs import logger
from data_prep.base.progress import Progress
from data_prep.base.terminal import counted
from data_prep.dataset.addition import removed_ids
from data_prep.dataset.manifest import Manifest
from data_prep.dataset.manifest_records import FileRecord, ShardRecord
from data_prep.dataset.provenance_sidecar import find_rows, read_provenance
from data_prep.dataset.removed_names import (
    RemovedNames,
    files_of_removed_names,
    hash_names,
    name_hash,
    removed_names,
)
from data_prep.dataset.shard_index import read_index
from data_prep.executors.executors import Executor, run_units
from data_prep.storage import storage

DOCUMENT_ID_NAMES = ("document_id", "document")
ID_NAMES = ("id", "ids", "doc_id", "docid", "uid")
URL_NAMES = ("url", "urls", "uri", "link")

_ID = re.compile("[0-9a-fA-F]{16}")
_SHOWN = 5
_SHARDS_AT_ONCE = 16  # whose indexes or sidecars one task searches
_DELIMITERS = {".csv": ",", ".tsv": "\t"}


@dataclass(frozen=True)
class RemovalRequest:
    """A source by name, or documents by id.

    Attributes:
        ids: (n,) uint64 document ids, ascending and unique.
        absent: (m,) uint64 ids of dropped copies of these documents, ascending and unique; additions exclude them too.
        names: the URLs or corpus ids that named the documents; additions exclude documents of them too.
        note: text for the manifest, such as who asked for the removal.
    """

    source: str | None = None
    ids: np.ndarray | None = None
    absent: np.ndarray | None = None
    note: str | None = None
    names: RemovedNames | None = None

    def __post_init__(self) -> None:
        assert (self.source is None) != (self.ids is None)

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
        names: hashes of those that it names.
        removed: values that it does not name and that were removed before.
        unknown: all other values that it does not name; both in the order of the list.
    """

    ids: np.ndarray
    absent: np.ndarray
    num_listed: int
    num_found: int
    names: RemovedNames
    removed: tuple[str, ...]
    unknown: tuple[str, ...]


@dataclass(frozen=True)
class _SearchTask:
    """Sidecars to search for values, which travel with every task."""

    folder: str
    files: tuple[FileRecord, ...]
    column: Literal["id", "url"]
    values: tuple[str, ...]


@dataclass(frozen=True)
class _IndexSearch:
    """Consecutive shards from the one of number `first`, in whose indexes a source or ids are searched."""

    first: int
    folder: str
    shards: tuple[ShardRecord, ...]
    source: int | None
    ids: np.ndarray | None


def read_list(url: str, names: Sequence[str]) -> list[tuple[int, str]]:
    """Read a list: one value per line (lines that begin with # are comments, white space at both ends does not count),
    or a CSV or TSV file with a header, whose cells count as they are.

    Args:
        names: lower-case names of the column with the values; the column of a table of one may have any name.

    Returns (line number, value) pairs.

    Raises:
        UserError: the file does not exist, is not text, has no such column, or is empty.
    """
    where = storage.redact(url)
    if not storage.exists(url):
        raise UsageError(f"{where} does not exist", fix="give the path or URL of a list", code="missing-path")
    try:
        text = storage.read_bytes(url).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where} is not UTF-8 text (byte {error.start})", fix="give a text, CSV or TSV file", code="invalid-list"
        ) from None
    delimiter = next((sign for ending, sign in _DELIMITERS.items() if url.lower().endswith(ending)), None)
    found = list(_plain_values(text) if delimiter is None else _table_values(text, delimiter, names, where))
    if not found:
        raise UserError(f"{where} lists nothing", fix="give one value per line", code="empty-list")
    return found


def read_document_ids(url: str) -> np.ndarray:
    """Read a list of document ids: 16 hexadecimal digits each, as `inspect` shows them; # begins a comment.

    Returns (n,) uint64, ascending and unique.

    Raises:
        UserError: a value is something else, or there is none.
    """
    ids: list[int] = []
    for number, value in read_list(url, DOCUMENT_ID_NAMES):
        word = value.partition("#")[0].strip()
        if not _ID.fullmatch(word):
            raise UsageError(
                f"{storage.redact(url)} line {number} is not a document id: {word[:40]!r}",
                fix="give the 16 hexadecimal digits that 'inspect' shows, such as 00f3a9c2d4e5b617; for the ids of "
                "your corpus use --ids, for URLs --urls",
                code="malformed-document-id",
            )
        ids.append(int(word, 16))
    return np.unique(np.array(ids, np.uint64))


def find_listed(
    folder: str, manifest: Manifest, column: Literal["id", "url"], values: Sequence[str], executor: Executor | int = 1
) -> ListedDocuments:
    """Find the documents whose provenance has one of these ids or URLs, dropped copies included.

    Reads every sidecar once, and no shard.

    Raises:
        UserError: the data set has no sidecars, or one is damaged.
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
    tasks = [
        _SearchTask(folder, files[first : first + _SHARDS_AT_ONCE], column, wanted)
        for first in range(0, len(files), _SHARDS_AT_ONCE)
    ]
    kept, own, found = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)], set[str]()
    with Progress("searching provenance", sum(file.bytes for file in files), "MB", 1e6) as progress:
        for task, (kept_as, document_ids, matched) in run_units(_search_sidecars, tasks, executor):
            kept.append(kept_as)
            own.append(document_ids)
            found |= matched
            progress.add(sum(file.bytes for file in task.files))
    ids = np.unique(np.concatenate(kept))
    missing = [value for value in dict.fromkeys(values) if value not in found]
    earlier = removed_names(folder, files_of_removed_names(manifest))
    hashes = set((earlier.urls if column == "url" else earlier.corpus_ids).tolist())
    return ListedDocuments(
        ids,
        np.setdiff1d(np.concatenate(own), ids),
        len(wanted),
        len(found),
        hash_names(urls=found) if column == "url" else hash_names(corpus_ids=found),
        tuple(value for value in missing if name_hash(value) in hashes),
        tuple(value for value in missing if name_hash(value) not in hashes),
    )


def find_documents(
    folder: str, manifest: Manifest, request: RemovalRequest, executor: Executor | int = 1
) -> list[Found] | None:
    """Return the documents of the request by shard, in the order of the manifest; None if they were removed before.

    Raises:
        UserError: the source or ids are unknown (the message lists them), or an index is damaged.
    """
    if request.source is not None:
        number = _source_number(folder, manifest, request.source)
        is_gone = request.source in manifest.removed_sources
        return None if is_gone else _search(folder, manifest, number, None, executor)
    assert request.ids is not None
    removed = removed_ids(folder, manifest)
    wanted = np.setdiff1d(request.ids, removed, assume_unique=True)
    if len(wanted):
        return _search(folder, manifest, None, wanted, executor)
    is_new = request.absent is not None and len(np.setdiff1d(request.absent, removed, assume_unique=True)) > 0
    return [] if is_new else None


def _plain_values(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(io.StringIO(text, newline=None), 1):
        if (value := line.strip()) and not value.startswith("#"):
            yield number, value


def _table_values(text: str, delimiter: str, names: Sequence[str], where: str) -> Iterator[tuple[int, str]]:
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        head = [name.strip().lower() for name in next(rows, [])]
        columns = [number for number, name in enumerate(head) if name in names] or ([0] if len(head) == 1 else [])
        if not columns:
            raise UsageError(
                f"{where} line 1 has no column {' or '.join(names)}; its columns are {', '.join(head) or 'none'}",
                fix="name the column with the values in the header",
                code="missing-column",
            )
        if head[columns[0]] not in names and "://" in head[0]:
            raise UsageError(
                f"{where} line 1 is a value, not the name of a column",
                fix=f"begin the file with a line that names the column, such as {names[0]}",
                code="missing-column",
            )
        if head[columns[0]] not in names:
            logger(__name__).warning(f"{where} line 1 is taken as the name of the column: {head[0]!r}")
        for row in rows:
            if row and len(row) != len(head):
                raise UserError(
                    f"{where} line {rows.line_num} has {len(row)} cells, and the header has {len(head)}",
                    fix=f"put quotation marks around a value that holds {delimiter!r}, or give the list as a text file "
                    "with one value per line",
                    code="invalid-list",
                )
            if row and row[columns[0]].strip():
                yield rows.line_num, row[columns[0]]
    except csv.Error as error:
        raise UserError(
            f"{where} line {rows.line_num} is not valid CSV ({error})", fix="correct the line", code="invalid-list"
        ) from None


def _search_sidecars(task: _SearchTask) -> tuple[np.ndarray, np.ndarray, set[str]]:
    """Return the ids under which matching rows are kept, their own ids, and the matched values."""
    kept, own, found = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)], set[str]()
    for file in task.files:
        rows = find_rows(read_provenance(task.folder, file), task.column, task.values)
        kept.append(rows["kept_as"].drop_null().to_numpy().astype(np.uint64))
        own.append(rows["document_id"].to_numpy().astype(np.uint64))
        found |= set(rows[task.column].to_pylist())
    return np.concatenate(kept), np.concatenate(own), found


def _source_number(folder: str, manifest: Manifest, name: str) -> int:
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
    in_order = [each for first in sorted(found) for each in found[first]]
    if ids is not None:
        unknown = np.setdiff1d(ids, np.concatenate([np.empty(0, np.uint64), *(each.ids for each in in_order)]))
        if len(unknown):
            raise _unknown(folder, unknown)
    return in_order


def _search_indexes(task: _IndexSearch) -> list[Found]:
    found = []
    for shard in task.shards:
        index = read_index(task.folder, shard)
        mine = index.document_sources == task.source if task.ids is None else np.isin(index.document_ids, task.ids)
        if mine.any():
            num_tokens = int(index.document_lengths[mine].sum(dtype=np.int64))
            found.append(Found(shard, np.flatnonzero(mine), index.document_ids[mine], num_tokens))
    return found


def _unknown(folder: str, ids: np.ndarray) -> UserError:
    listed = ", ".join(f"{document:016x}" for document in ids[:_SHOWN].tolist())
    more = " ..." if len(ids) > _SHOWN else ""
    return UsageError(
        f"{storage.redact(folder)} does not hold {len(ids):,} of the given document ids: {listed}{more}",
        fix="take ids of other data sets out of the list; 'inspect' shows ids, the xxh3_64 of a normalized text",
        code="unknown-document",
    )
