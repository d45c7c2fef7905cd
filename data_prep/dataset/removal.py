"""Taking documents out of a data set: the shards that hold them are rewritten, without tokenizing, as a new version.

What is unfinished lies in DATASET/.removal; a stopped removal goes on from the shards that are done, to the same bytes.
Shards that hold nothing of it stay as they are, and the old ones stay for the versions that name them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import safetensors.numpy

from data_prep.base.errors import UserError
from data_prep.dataset.addition import REMOVED_IDS, removed_ids
from data_prep.dataset.counts import SOURCE_COLUMNS, read_token_counts, split_record, token_counts_file
from data_prep.dataset.manifest import Manifest, read_manifest
from data_prep.dataset.manifest_records import FileRecord, RemovalRecord, ShardRecord, SourceRecord
from data_prep.dataset.removal_request import Found, RemovalRequest, find_documents
from data_prep.dataset.shard_rewrite import RewriteTask, read_result, result_url, rewrite_shard
from data_prep.dataset.shards import SHARD_NAME, shard_name
from data_prep.dataset.state_files import read_state, write_state
from data_prep.dataset.versions import (
    PREPARATION_WORK,
    REMOVAL_WORK,
    next_shard_number,
    next_version,
    publish,
    refuse_unfinished,
    stray_files,
)
from data_prep.executors.executors import Executor
from data_prep.executors.phases import PhaseRunner
from data_prep.storage import storage

_PLAN_NAME = "plan.json"


def remove_documents(
    folder: str, request: RemovalRequest, executor: Executor | int, fresh: bool = False
) -> tuple[Manifest, bool]:
    """Publish a version without what the request names; returns its manifest, and whether there was anything to do.

    Args:
        fresh: give up a removal that was begun and is not finished, and start again.

    Raises:
        UserError: nothing of that name is there, nothing would be left, a shard is damaged, the folder holds other
            unfinished work or is being worked on.
    """
    read_manifest(folder)  # before the lock, which would make a folder of a misspelt name
    with storage.hold_lock(folder) as lock:
        parent = read_manifest(folder)
        refuse_unfinished(folder, (PREPARATION_WORK,))
        _give_up_stale(folder, parent, fresh)
        found = find_documents(folder, parent, request)
        if found is None:
            return parent, False
        check_something_is_left(folder, parent, found)
        version = next_version(parent)
        first_number = _begin(folder, parent, request, fresh)
        for place in (folder, _work_folder(folder)):
            storage.remove_unfinished(place)
        tasks = _tasks(folder, parent, found, first_number)
        runner = PhaseRunner(executor, lock)
        runner.run("rewriting", rewrite_shard, tasks, result_url, lambda task: task.shard.bytes, ("MB", 1e6))
        manifest = _finish(folder, parent, request, tasks, version)
        lock.check()
        storage.remove_unfinished(folder)  # of workers that were killed on the way
        publish(folder, manifest)
        storage.remove(_work_folder(folder))
    return manifest, True


def check_something_is_left(folder: str, manifest: Manifest, found: Sequence[Found]) -> None:
    """Refuse to empty a split.

    Raises:
        UserError: every document of it would go.
    """
    for split in ("train", "valid"):
        documents = manifest.split(split).documents
        gone = sum(len(part.numbers) for part in found if part.shard.name.startswith(split))
        if documents and gone == documents:
            raise UserError(
                f"nothing would be left in the {split} split of {storage.redact(folder)}, all of whose {documents:,} "
                "documents are to go; make a new data set of what shall stay"
            )


def _work_folder(folder: str) -> str:
    return storage.join(folder, REMOVAL_WORK)


def _read_plan(folder: str) -> dict[str, Any] | None:
    url = storage.join(_work_folder(folder), _PLAN_NAME)
    return read_state(url) if storage.exists(url) else None


def _begin(folder: str, parent: Manifest, request: RemovalRequest, fresh: bool) -> int:
    """Begin the removal, or go on with it; returns the number of its first new shard."""
    mine, begun = {"parent": parent.digest, **request.description}, _read_plan(folder)
    if begun is not None and not fresh and {**mine, "first_number": begun["first_number"]} == begun:
        first_number: int = begun["first_number"]
        return first_number
    if begun is not None and not fresh:
        what = "documents by their ids" if begun["source"] is None else f"source {begun['source']!r}"
        raise UserError(
            f"{storage.redact(folder)} holds an unfinished removal of {what}; run that command again until it "
            "ends, or give it up with --fresh"
        )
    if begun is not None:
        _give_up(folder, begun)
    first_number = next_shard_number(folder)
    url = storage.join(_work_folder(folder), _PLAN_NAME)
    write_state(url, {**mine, "first_number": first_number})
    return first_number


def _give_up_stale(folder: str, parent: Manifest, fresh: bool) -> None:
    """End a removal that began with another version: it was published, or another command was before it.

    Without its plan, which is its first file, the folder of its work is what is left of one that was being removed.
    """
    try:
        begun = _read_plan(folder)
    except UserError:
        if not fresh:
            raise
        begun = None  # which shards are its own is not known: `verify` names them
    if begun is None:
        storage.remove(_work_folder(folder))
    elif begun["parent"] != parent.digest:
        _give_up(folder, begun)


def _give_up(folder: str, begun: dict[str, Any]) -> None:
    """Remove what a removal has written and no version names."""
    for name in stray_files(folder):
        match = SHARD_NAME.fullmatch(name)
        if match and int(match[2]) >= begun["first_number"]:
            storage.remove(storage.join(folder, name))
    storage.remove(_work_folder(folder))


def _tasks(folder: str, parent: Manifest, found: Iterable[Found], first_number: int) -> list[RewriteTask]:
    numbers = {"train": first_number, "valid": first_number}
    tasks = []
    for part in found:
        split: Literal["train", "valid"] = "train" if part.shard.name.startswith("train") else "valid"
        name = shard_name(split, numbers[split])
        numbers[split] += 1
        tasks.append(RewriteTask(folder, part.shard, name, part.numbers, parent.tokenizer, len(parent.sources)))
    return tasks


def _finish(
    folder: str, parent: Manifest, request: RemovalRequest, tasks: Sequence[RewriteTask], version: int
) -> Manifest:
    """Write what stands beside the shards; returns the manifest, not yet published."""
    results = {task.shard.name: read_result(task) for task in tasks}
    _check_written(folder, [result.shard for result in results.values() if result.shard is not None])
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
    removal = RemovalRecord(
        version=version,
        source=request.source,
        ids=None if request.ids is None else _write_ids(folder, parent, request.ids, version),
        documents=int(gone[:, 0].sum()),
        tokens=int(gone[:, 2].sum()),
        note=request.note,
    )
    return parent.model_copy(
        update={
            **splits,
            "sources": tuple(map(_without, parent.sources, gone.tolist())),
            "token_counts": counts_record,
            "version": version,
            "parent": parent.digest,
            "removals": (*parent.removals, removal),
        }
    )


def _check_written(folder: str, shards: Sequence[ShardRecord]) -> None:
    """See that what earlier starts wrote is still there; another command may have given this removal up."""
    for shard in shards:
        for file in (shard, shard.index):
            url = storage.join(folder, file.name)
            if not storage.exists(url) or storage.size(url) != file.bytes:
                raise UserError(
                    f"{storage.redact(url)} was written by this removal and is gone; run the same command with --fresh"
                )


def _write_ids(folder: str, parent: Manifest, ids: np.ndarray, version: int) -> FileRecord:
    new = np.setdiff1d(ids, removed_ids(folder, parent), assume_unique=True)
    name, data = f"removed-{version:06d}.safetensors", safetensors.numpy.save({REMOVED_IDS: new})
    storage.write_bytes(storage.join(folder, name), data)
    return FileRecord(name=name, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def _without(source: SourceRecord, gone: Sequence[int]) -> SourceRecord:
    left = {name: getattr(source, name) - count for name, count in zip(SOURCE_COLUMNS, gone, strict=True)}
    removed = source.dropped.get("removed", 0) + gone[0]
    dropped = {**source.dropped, "removed": removed} if removed else source.dropped
    return source.model_copy(update={**left, "dropped": dict(sorted(dropped.items()))})
