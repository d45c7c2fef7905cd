"""The phase between map and reduce: documents that are dropped for reasons that no single shard can see.

Near-duplicates are known only once the entire corpus was read; the others are in the extended data set, or were removed
from it. A work file passes their ids to the units that write shards, each of which reads only the ids of its own group:
the file has one row of parts, those of the groups, and its table has the number of ids of each drop and group. The
table may name further files of the same kind, written by several processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_prep.base.logs import logger
from data_prep.base.terminal import counted
from data_prep.dataset.manifest import Manifest
from data_prep.dataset.manifest_records import ShardRecord
from data_prep.dataset.removed_names import REMOVED_EARLIER, removed_ids
from data_prep.dataset.shards import read_index
from data_prep.deduplication.near_duplicates import (
    SignatureTask,
    find_near_duplicates,
    shard_signatures,
    shard_signatures_url,
    signatures_url,
)
from data_prep.documents.drops import DEDUPLICATION, NEAR_DUPLICATES, TAKEDOWNS, Drop, drop_of_earlier_work
from data_prep.executors.phases import PhaseRunner
from data_prep.pipeline.job import Job
from data_prep.pipeline.plan import Plan
from data_prep.storage import storage
from data_prep.storage.work_files import PartsWriter, open_parts

KNOWN_SHARDS_AT_ONCE = 128
"""Shards of the data set that is added to, of which one task reads the ids."""
_KNOWN = Drop(DEDUPLICATION, "in the data set already")
NEAR = Drop(NEAR_DUPLICATES, "near duplicate")
EXCLUSIONS_NAME = "exclusions"
_KIND = b"clozeex1"


@dataclass(frozen=True)
class KnownShards:
    """Shards of the data set that is added to, whose ids are written by group of the addition to the URL."""

    shards: tuple[ShardRecord, ...]
    url: str


def run_exclusions(plan: Plan, job: Job, runner: PhaseRunner) -> None:
    """Write the exclusions of the plan; the existence of the file marks the phase as done."""
    url = storage.join(job.work_folder, EXCLUSIONS_NAME)
    if storage.exists(url):
        return
    excluded: dict[Drop, np.ndarray] = {}
    files: list[str] = []
    if plan.parent is not None:
        _warn_of_unread_names(plan)
        removed = removed_ids(job.output, plan.parent)
        excluded[Drop(TAKEDOWNS, REMOVED_EARLIER)] = np.column_stack([removed, np.zeros_like(removed)])
        if plan.config.deduplication.exact:
            excluded[_KNOWN] = np.empty((0, 2), np.uint64)
            files = _write_known_ids(job, plan.parent, runner)
    if plan.config.deduplication.near:
        excluded[NEAR] = _near_duplicates(plan, job, runner)
    if excluded:
        destinations = plan.destinations
        write_exclusions(url, excluded, destinations.num_sections, destinations.groups_of, files)


def write_known_ids(job: Job, known_shards: KnownShards) -> int:
    """Write the ids of the shards' documents; the existing file marks them as done. Return their number."""
    known, destinations = known_ids(job.output, known_shards.shards), job.destinations
    excluded = {_KNOWN: np.column_stack([known, known])}
    write_exclusions(known_shards.url, excluded, destinations.num_sections, destinations.groups_of)
    return len(known)


def known_ids(folder: str, shards: Iterable[ShardRecord]) -> np.ndarray:
    """Return the ids of all documents of these shards, (num_documents,) uint64, ascending; 8 bytes per document."""
    ids = np.empty(0, np.uint64)
    for shard in shards:
        found = read_index(folder, shard).document_ids
        filled = len(ids)
        ids.resize(filled + len(found), refcheck=False)  # in place: a count in the manifest must not allocate memory
        ids[filled:] = found
    ids.sort()
    return ids


def _write_known_ids(job: Job, parent: Manifest, runner: PhaseRunner) -> list[str]:
    """Have the workers write the ids that the data set holds; return the names of the files."""
    names = [f"known-{first:06d}" for first in range(0, len(parent.shards), KNOWN_SHARDS_AT_ONCE)]
    tasks = [
        KnownShards(
            parent.shards[number * KNOWN_SHARDS_AT_ONCE : (number + 1) * KNOWN_SHARDS_AT_ONCE],
            storage.join(job.work_folder, name),
        )
        for number, name in enumerate(names)
    ]
    runner.run(
        "reading indexes",
        job.task(write_known_ids),
        tasks,
        lambda task: task.url,
        lambda task: sum(shard.documents for shard in task.shards),
        ("documents", 1.0),
    )
    return names


def _warn_of_unread_names(plan: Plan) -> None:
    """Warn where URLs or corpus ids were removed from the data set and the addition does not read them."""
    assert plan.parent is not None
    removals, settings = plan.parent.removals, plan.reading.settings
    has_ids = all(each.id_field for each in settings) or plan.text_files == plan.inputs
    for number, noun, setting, is_read in (
        (sum(item.urls for item in removals), "URL", "documents.url_field", all(each.url_field for each in settings)),
        (sum(item.corpus_ids for item in removals), "corpus id", "documents.id_field", has_ids),
    ):
        if number and not is_read:
            what = f"{counted(number, noun)} removed from the data set, and {setting} is not set"
            logger(__name__).warning(f"{what}: documents of them are recognized by their text only")


def _near_duplicates(plan: Plan, job: Job, runner: PhaseRunner) -> np.ndarray:
    parent_tasks = _parent_tasks(plan, job)
    if parent_tasks:
        runner.run(
            "signing",
            shard_signatures,
            parent_tasks,
            shard_signatures_url,
            lambda task: task.shard.documents,
            ("documents", 1.0),
        )
    urls = [shard_signatures_url(task) for task in parent_tasks]
    urls += [signatures_url(job.work_folder, name) for name in job.units]
    return find_near_duplicates(urls, job.deduplication, job.work_folder, runner.run, len(parent_tasks))


def _parent_tasks(plan: Plan, job: Job) -> list[SignatureTask]:
    """Return tasks for the shards of the extended data set; its documents precede all new ones."""
    if plan.parent is None:
        return []
    shards = (*plan.parent.train.shards, *plan.parent.valid.shards)
    return [SignatureTask(job.output, shard, job.deduplication, job.work_folder) for shard in shards]


def write_exclusions(
    url: str,
    excluded: Mapping[Drop, np.ndarray],
    num_groups: int,
    groups_of: Callable[[np.ndarray], np.ndarray],
    files: Sequence[str] = (),
) -> None:
    """Write the documents of each drop by group; `groups_of` returns the groups of ids (n,).

    Args:
        excluded: (n, 2) uint64: the id of a document, and the id of the one that represents it in the data set,
            or 0.
        files: names of further files in the same folder, of no other drops.
    """
    counts: list[list[Any]] = []
    groups: list[list[np.ndarray]] = []
    for drop, ids in excluded.items():
        ids = ids[np.unique(ids[:, 0], return_index=True)[1]].astype("<u8")
        numbers = groups_of(ids[:, 0])
        of_each = np.bincount(numbers, minlength=num_groups)
        counts.append([*drop, of_each.tolist()])
        groups.append(np.split(ids[np.argsort(numbers, kind="stable")], np.cumsum(of_each)[:-1]))
    with storage.local_write(url) as path, open(path, "wb") as file:
        writer = PartsWriter(file, _KIND, num_groups)
        for parts in zip(*groups, strict=True):
            writer.add(np.concatenate(parts).tobytes())
        writer.close({"counts": counts, "files": list(files)})


def read_exclusions(url: str, group: int) -> dict[Drop, np.ndarray]:
    """Return the ids to drop from a group, (n, 2) as they were written, sorted; empty without a file."""
    if not storage.exists(url):
        return {}
    ids, files = _read(url, group)
    parts = {drop: [found] for drop, found in ids.items()}
    for name in files:
        for drop, found in _read(storage.join(url.rpartition("/")[0], name), group)[0].items():
            parts[drop].append(found)
    return {drop: found[0] if len(found) == 1 else _sorted_once(found) for drop, found in parts.items()}


def _read(url: str, group: int) -> tuple[dict[Drop, np.ndarray], list[str]]:
    """Read the ids of a group in one file, and the names of the files that it names."""
    with open_parts(url, _KIND) as parts:
        table = parts.table()
        ids = np.frombuffer(parts.read(0, group), "<u8")
    named = table["counts"]
    if isinstance(named, dict):  # of an earlier release, by reason
        named = [[*drop_of_earlier_work(reason), of_groups] for reason, of_groups in named.items()]
    counts = np.array([of_groups for *_, of_groups in named], np.int64)  # (num_drops, num_groups)
    split = np.split(ids.reshape(-1, 2), np.cumsum(counts[:-1, group]))
    return {Drop(step, reason): found for (step, reason, _), found in zip(named, split, strict=True)}, table["files"]


def _sorted_once(parts: Sequence[np.ndarray]) -> np.ndarray:
    ids = np.concatenate(parts)
    once: np.ndarray = ids[np.unique(ids[:, 0], return_index=True)[1]]
    return once
