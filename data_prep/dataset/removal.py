"""Removing documents from a data set: rewrites the shards that hold them, without tokenizing, as a new version.

Unfinished work is in DATASET/.removal; an interrupted removal resumes from the finished shards, with the same bytes.
Other shards stay as they are, and the old files stay for the versions that name them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import safetensors.numpy

from data_prep.base.errors import UsageError, UserError
from data_prep.dataset.counts import SOURCE_COLUMNS, read_token_counts, split_record, token_counts_file
from data_prep.dataset.manifest import Manifest, read_manifest
from data_prep.dataset.manifest_records import FileRecord, RemovalRecord, ShardRecord, record_of
from data_prep.dataset.provenance_sidecar import read_provenance, rows_to_remove
from data_prep.dataset.removal_request import Found, RemovalRequest, find_documents
from data_prep.dataset.removed_names import (
    NOT_PRESENT,
    REMOVED_IDS,
    RemovedNames,
    files_of_removed_names,
    hash_names,
    removed_ids,
    removed_names,
)
from data_prep.dataset.shard_rewrite import RewriteResult, RewriteTask, read_result, result_url, rewrite_shard
from data_prep.dataset.shards import SHARD_NAME, shard_name
from data_prep.dataset.versions import (
    PREPARATION_WORK,
    REMOVAL_WORK,
    next_shard_number,
    next_version,
    publish,
    refuse_unfinished,
    stray_files,
)
from data_prep.executors.executors import Executor, run_units
from data_prep.executors.phases import PhaseRunner
from data_prep.storage import storage
from data_prep.storage.work_files import read_state, write_state

_PLAN_NAME = "plan.json"


def remove_documents(
    folder: str, request: RemovalRequest, executor: Executor | int, fresh: bool = False
) -> tuple[Manifest, bool]:
    """Publish a version without the documents of the request; return its manifest, and whether anything was removed.

    Args:
        fresh: discard another unfinished removal.
    """
    read_manifest(folder)  # before the lock, which would create a folder with a misspelled name
    with storage.hold_lock(folder) as lock:
        parent = read_manifest(folder)
        refuse_unfinished(folder, (PREPARATION_WORK,))
        _discard_stale(folder, parent, fresh)
        found = find_documents(folder, parent, request, executor)
        if found is None:
            return parent, False
        check_something_is_left(folder, parent, found)
        version = next_version(parent)
        sidecars = find_sidecars(folder, parent, _gone_ids(request, found), request.source, executor)
        first_number = _begin(folder, parent, request, fresh)
        for each in (folder, _work_folder(folder)):
            storage.remove_unfinished(each)
        tasks = _tasks(folder, parent, request, found, sidecars, first_number)
        runner = PhaseRunner(executor, lock)
        runner.run("rewriting", rewrite_shard, tasks, result_url, lambda task: task.bytes, ("MB", 1e6))
        manifest = _finish(folder, parent, request.answered(found), tasks, version)
        lock.check()
        storage.remove_unfinished(folder)  # of killed workers
        publish(folder, manifest)
        storage.remove(_work_folder(folder))
    return manifest, True


def check_something_is_left(folder: str, manifest: Manifest, found: Sequence[Found]) -> None:
    """Refuse to empty a split."""
    for split in ("train", "valid"):
        documents = manifest.split(split).documents
        gone = sum(len(part.numbers) for part in found if part.shard.name.startswith(split))
        if documents and gone == documents:
            raise UsageError(
                f"the removal would take all {documents:,} documents of the {split} split of {storage.redact(folder)}",
                fix="prepare a new data set without them",
                code="would-empty-split",
            )


class Remembered(NamedTuple):
    """What a removal adds to the values that additions leave out.

    Attributes:
        ids: (n,) uint64 document ids, ascending and unique.
        names: URLs and corpus ids.
        not_present: (m,) uint64 those of the `names`, or of the `ids` if it lists document ids, that no document has.
    """

    ids: np.ndarray
    names: RemovedNames
    not_present: np.ndarray


def remembered(folder: str, parent: Manifest, request: RemovalRequest) -> Remembered:
    """Return what additions leave out because of this request alone, with its `answered` documents."""
    nothing = np.empty(0, np.uint64)
    ids = nothing if request.excluded_ids is None else np.setdiff1d(request.excluded_ids, removed_ids(folder, parent))
    names = (request.names or hash_names()).without(removed_names(folder, files_of_removed_names(parent)))
    listed = ids if request.names is None else np.concatenate(names)
    return Remembered(ids, names, np.intersect1d(request.not_present, listed))


def find_sidecars(
    folder: str, manifest: Manifest, gone_ids: np.ndarray, source: str | None, executor: Executor | int
) -> frozenset[str]:
    """Return the names of the provenance sidecars with rows to remove."""
    tasks = [_SidecarTask(folder, file, gone_ids, source) for file in manifest.provenance_files]
    return frozenset(task.file.name for task, has_rows in run_units(_has_rows_to_remove, tasks, executor) if has_rows)


@dataclass(frozen=True)
class _SidecarTask:
    folder: str
    file: FileRecord
    gone_ids: np.ndarray
    source: str | None


def _has_rows_to_remove(task: _SidecarTask) -> bool:
    return bool(rows_to_remove(read_provenance(task.folder, task.file), task.gone_ids, task.source).any())


def _gone_ids(request: RemovalRequest, found: Sequence[Found]) -> np.ndarray:
    """Return the ids of all documents to take out, (n,) uint64, ascending, with those of dropped copies."""
    absent = np.empty(0, np.uint64) if request.absent is None else request.absent
    return np.unique(np.concatenate([absent, *(part.ids for part in found)]))


def _work_folder(folder: str) -> str:
    return storage.join(folder, REMOVAL_WORK)


def _read_plan(folder: str) -> dict[str, Any] | None:
    url = storage.join(_work_folder(folder), _PLAN_NAME)
    return read_state(url) if storage.exists(url) else None


def _begin(folder: str, parent: Manifest, request: RemovalRequest, fresh: bool) -> int:
    """Start the removal, or resume it; return the number of its first new shard."""
    mine, started = {"parent": parent.digest, **request.description}, _read_plan(folder)
    if started is not None and not fresh and {**mine, "first_number": started["first_number"]} == started:
        first_number: int = started["first_number"]
        return first_number
    if started is not None and not fresh:
        what = "documents by id" if started["source"] is None else f"source {started['source']!r}"
        raise UserError(
            f"{storage.redact(folder)} holds an unfinished removal of {what}",
            fix="rerun that command until it finishes, or discard it with --fresh",
            code="unfinished-work",
        )
    if started is not None:
        _discard(folder, started)
    first_number = next_shard_number(folder)
    url = storage.join(_work_folder(folder), _PLAN_NAME)
    write_state(url, {**mine, "first_number": first_number})
    return first_number


def _discard_stale(folder: str, parent: Manifest, fresh: bool) -> None:
    """Discard a removal that started from another version: it was published, or another command came first.

    The plan is the first file of a work folder; a folder without it is a remainder of a deletion.
    """
    try:
        started = _read_plan(folder)
    except UserError:
        if not fresh:
            raise
        started = None  # its shards are unknown then: `verify` lists them as stray files
    if started is None:
        storage.remove(_work_folder(folder))
    elif started["parent"] != parent.digest:
        _discard(folder, started)


def _discard(folder: str, started: dict[str, Any]) -> None:
    """Delete the files of a removal that no version names."""
    for name in stray_files(folder):
        match = SHARD_NAME.fullmatch(name)
        if match and int(match[2]) >= started["first_number"]:
            storage.remove(storage.join(folder, name))
    storage.remove(_work_folder(folder))


def _tasks(
    folder: str,
    parent: Manifest,
    request: RemovalRequest,
    found: Sequence[Found],
    sidecars: Collection[str],
    first_number: int,
) -> list[RewriteTask]:
    """Return a task for every shard or detached sidecar that loses documents or rows."""
    numbers_of, gone_ids = {part.shard.name: part.numbers for part in found}, _gone_ids(request, found)
    next_number = {"train": first_number, "valid": first_number}
    tasks = []
    of_shards: list[tuple[ShardRecord | None, FileRecord | None]] = [(item, item.provenance) for item in parent.shards]
    for shard, sidecar in [*of_shards, *((None, file) for file in parent.detached_provenance)]:
        gone = np.empty(0, np.int64) if shard is None else numbers_of.get(shard.name, np.empty(0, np.int64))
        rewritten = sidecar if sidecar is not None and sidecar.name in sidecars else None
        if not len(gone) and rewritten is None:
            continue
        old_name = next(file.name for file in (shard, sidecar) if file is not None)
        split: Literal["train", "valid"] = "train" if old_name.startswith("train") else "valid"
        name = shard_name(split, next_number[split])
        next_number[split] += 1
        tasks.append(
            RewriteTask(
                folder=folder,
                shard=shard,
                provenance=rewritten,
                name=name,
                gone=gone,
                gone_ids=gone_ids,
                gone_source=request.source,
                tokenizer=parent.tokenizer,
                num_sources=len(parent.sources),
            )
        )
    return tasks


def _finish(
    folder: str, parent: Manifest, request: RemovalRequest, tasks: Sequence[RewriteTask], version: int
) -> Manifest:
    """Write the files beside the shards; return the manifest, which is not published yet."""
    done = [(task, read_result(task)) for task in tasks]
    _check_written(folder, [result for _, result in done])
    results = {task.shard.name: result for task, result in done if task.shard is not None}
    rewritten = {task.provenance.name for task, _ in done if task.provenance is not None}
    kept = [file for file in parent.detached_provenance if file.name not in rewritten]
    detached = [*kept, *(result.detached for _, result in done if result.detached is not None)]
    counts = read_token_counts(folder, parent)
    splits = {}
    for split in ("train", "valid"):
        shards = []
        for shard in parent.split(split).shards:
            result = results.get(shard.name)
            if result is not None:
                counts[split] = counts[split] - result.token_counts
            shards.append(shard if result is None else result.shard)
        splits[split] = split_record([shard for shard in shards if shard is not None], counts[split])
    counts_record, data = token_counts_file(counts, version)
    storage.write_bytes(storage.join(folder, counts_record.name), data)
    nothing = np.zeros((len(parent.sources), len(SOURCE_COLUMNS)), np.int64)
    gone = np.sum([nothing, *(result.source_counts for result in results.values())], axis=0)
    new = remembered(folder, parent, request)
    removal = RemovalRecord(
        version=version,
        source=request.source,
        ids=None if request.ids is None else _write_ids(folder, new, version),
        documents=int(gone[:, 0].sum()),
        tokens=int(gone[:, 2].sum()),
        note=request.note,
        urls=len(new.names.urls),
        corpus_ids=len(new.names.corpus_ids),
        not_present=len(new.not_present),
    )
    return parent.model_copy(
        update={
            **splits,
            "sources": tuple(
                source.without(dict(zip(SOURCE_COLUMNS, counts, strict=True)))
                for source, counts in zip(parent.sources, gone.tolist(), strict=True)
            ),
            "token_counts": counts_record,
            "version": version,
            "parent": parent.digest,
            "removals": (*parent.removals, removal),
            "detached_provenance": tuple(sorted(detached, key=lambda file: file.name)),
        }
    )


def _check_written(folder: str, results: Sequence[RewriteResult]) -> None:
    """Check that the files of earlier starts still exist; another command may have discarded this removal."""
    for result in results:
        shard = result.shard
        files = [result.detached] if shard is None else [shard, shard.index, shard.provenance]
        for file in files:
            if file is None:
                continue
            url = storage.join(folder, file.name)
            if not storage.exists(url) or storage.size(url) != file.bytes:
                raise UserError(
                    f"{storage.redact(url)}, which this removal wrote, is missing",
                    fix="rerun the same command with --fresh",
                    code="work-lost",
                )


def _write_ids(folder: str, new: Remembered, version: int) -> FileRecord:
    absent = {NOT_PRESENT: new.not_present} if len(new.not_present) else {}
    data = safetensors.numpy.save({REMOVED_IDS: new.ids, **new.names.tensors(), **absent})
    name = f"removed-{version:06d}.safetensors"
    storage.write_bytes(storage.join(folder, name), data)
    return record_of(name, data)
