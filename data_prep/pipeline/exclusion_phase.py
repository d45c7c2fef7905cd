"""The phase between map and reduce: documents that are dropped for reasons that no single shard can see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data_prep.base.logs import logger
from data_prep.base.terminal import counted
from data_prep.dataset.addition import known_ids, removed_ids
from data_prep.dataset.manifest import Manifest
from data_prep.dataset.manifest_records import ShardRecord
from data_prep.deduplication.exclusions import NAME, write_exclusions
from data_prep.deduplication.near_duplicates import (
    SignatureTask,
    find_near_duplicates,
    shard_signatures,
    shard_signatures_url,
    signatures_url,
)
from data_prep.executors.phases import PhaseRunner
from data_prep.pipeline.destinations import Destinations
from data_prep.pipeline.map_task import MapTask
from data_prep.pipeline.plan import Plan
from data_prep.storage import storage

KNOWN_SHARDS_AT_ONCE = 128
"""Shards of the data set that is added to, of which one task reads the ids."""
_KNOWN = "in the data set already"


@dataclass(frozen=True)
class KnownIdsTask:
    """Shards of the data set that is added to, whose ids are written by group of the addition."""

    folder: str
    shards: tuple[ShardRecord, ...]
    destinations: Destinations
    url: str


def run_exclusions(plan: Plan, tasks: Sequence[MapTask], output: str, runner: PhaseRunner) -> None:
    """Write the exclusions of the plan; the existence of the file marks the phase as done."""
    url = storage.join(plan.work_folder(output), NAME)
    if storage.exists(url):
        return
    ids_by_reason: dict[str, np.ndarray] = {}
    files: list[str] = []
    if plan.parent is not None:
        _warn_of_unread_names(plan)
        removed = removed_ids(output, plan.parent)
        ids_by_reason["removed earlier"] = np.column_stack([removed, np.zeros_like(removed)])
        if plan.config.deduplication.exact:
            ids_by_reason[_KNOWN] = np.empty((0, 2), np.uint64)
            files = _write_known_ids(plan, plan.parent, output, runner)
    if plan.config.deduplication.near:
        ids_by_reason["near duplicate"] = _near_duplicates(plan, tasks, output, runner)
    if ids_by_reason:
        destinations = plan.destinations
        write_exclusions(url, ids_by_reason, destinations.num_sections, destinations.groups_of, files)


def write_known_ids(task: KnownIdsTask) -> int:
    """Write the ids of the shards' documents; the existing file marks the task as done. Return their number."""
    known, destinations = known_ids(task.folder, task.shards), task.destinations
    by_reason = {_KNOWN: np.column_stack([known, known])}
    write_exclusions(task.url, by_reason, destinations.num_sections, destinations.groups_of)
    return len(known)


def _write_known_ids(plan: Plan, parent: Manifest, output: str, runner: PhaseRunner) -> list[str]:
    """Have the workers write the ids that the data set holds; return the names of the files."""
    names = [f"known-{first:06d}" for first in range(0, len(parent.shards), KNOWN_SHARDS_AT_ONCE)]
    work_folder = storage.absolute(plan.work_folder(output))
    tasks = [
        KnownIdsTask(
            storage.absolute(output),
            parent.shards[number * KNOWN_SHARDS_AT_ONCE : (number + 1) * KNOWN_SHARDS_AT_ONCE],
            plan.destinations,
            storage.join(work_folder, name),
        )
        for number, name in enumerate(names)
    ]
    runner.run(
        "reading indexes",
        write_known_ids,
        tasks,
        lambda task: task.url,
        lambda task: sum(shard.documents for shard in task.shards),
        ("documents", 1.0),
    )
    return names


def _warn_of_unread_names(plan: Plan) -> None:
    """Warn where URLs or corpus ids were removed from the data set and the addition does not read them."""
    assert plan.parent is not None
    removals, documents = plan.parent.removals, plan.config.documents
    has_ids = documents.id_field or plan.text_files == plan.inputs
    for number, noun, setting, field in (
        (sum(item.urls for item in removals), "URL", "documents.url_field", documents.url_field),
        (sum(item.corpus_ids for item in removals), "corpus id", "documents.id_field", has_ids),
    ):
        if number and not field:
            what = f"{counted(number, noun)} removed from the data set, and {setting} is not set"
            logger(__name__).warning(f"{what}: documents of them are recognized by their text only")


def _near_duplicates(plan: Plan, tasks: Sequence[MapTask], output: str, runner: PhaseRunner) -> np.ndarray:
    settings = plan.config.deduplication
    work_folder = storage.absolute(plan.work_folder(output))
    parent_tasks = _parent_tasks(plan, output, work_folder)
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
    urls += [signatures_url(task.work_folder, task.number) for task in tasks]
    return find_near_duplicates(urls, settings, work_folder, runner.run, len(parent_tasks))


def _parent_tasks(plan: Plan, output: str, work_folder: str) -> list[SignatureTask]:
    """Return tasks for the shards of the extended data set; its documents precede all new ones."""
    if plan.parent is None:
        return []
    shards = (*plan.parent.train.shards, *plan.parent.valid.shards)
    return [SignatureTask(storage.absolute(output), shard, plan.config.deduplication, work_folder) for shard in shards]
