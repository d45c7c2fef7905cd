"""Check of one provenance sidecar against its manifest, its shard and the removals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from data_prep.base.errors import UserError
from data_prep.dataset.manifest_records import FileRecord
from data_prep.dataset.provenance_sidecar import read_provenance, rows_to_remove
from data_prep.storage import storage


@dataclass(frozen=True)
class SidecarTask:
    """A sidecar to check.

    Attributes:
        shard_ids: (n,) uint64 ids of the documents of its shard, any order; empty for a detached sidecar.
        removed_ids: (m,) uint64 ids of removed documents.
        removed_sources: names of removed sources.
        source_names: names of all sources of the manifest.
    """

    folder: str
    file: FileRecord
    shard_ids: np.ndarray
    removed_ids: np.ndarray
    removed_sources: tuple[str, ...]
    source_names: tuple[str, ...]


@dataclass(frozen=True)
class SidecarFindings:
    """Problems of a sidecar, and the ids (k,) uint64 that must be in the data set."""

    problems: tuple[str, ...]
    kept_ids: np.ndarray


def check_sidecar(task: SidecarTask) -> SidecarFindings:
    """Read the whole sidecar and compare it."""
    try:
        table = read_provenance(task.folder, task.file)
    except UserError as error:
        return SidecarFindings((str(error),), np.empty(0, np.uint64))
    document_ids = table["document_id"].to_numpy().astype(np.uint64)
    kept_ids = np.unique(table["kept_as"].drop_null().to_numpy().astype(np.uint64))
    removed = int(rows_to_remove(table, task.removed_ids).sum())
    sources = set(table["source"].unique().to_pylist())
    problems = _problems(task, len(np.setdiff1d(task.shard_ids, document_ids)), removed, sources)
    return SidecarFindings(tuple(problems), kept_ids)


def _problems(task: SidecarTask, num_missing: int, num_removed: int, sources: set[str]) -> Iterator[str]:
    where = storage.redact(storage.join(task.folder, task.file.name))
    if num_missing:
        yield f"{where} has no row for {num_missing} documents of its shard. Fix: restore it, or rebuild the data set"
    if num_removed:
        yield f"{where} has {num_removed} rows of removed documents. Fix: restore it, or rebuild the data set"
    for name in sorted(sources & set(task.removed_sources)):
        yield f"{where} has rows of the removed source {name!r}. Fix: restore it, or rebuild the data set"
    for name in sorted(sources - set(task.source_names)):
        yield f"{where} has rows of source {name!r}, which the manifest does not name. Fix: rebuild the data set"
