"""The phase between map and reduce: documents that are dropped for reasons that no single shard can see."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from data_prep.base.terminal import counted
from data_prep.dataset.addition import known_ids, removed_ids
from data_prep.deduplication.exclusions import NAME, write_exclusions
from data_prep.deduplication.near_duplicates import (
    SignatureTask,
    find_near_duplicates,
    shard_signatures,
    shard_signatures_url,
    signatures_url,
)
from data_prep.executors.phases import PhaseRunner
from data_prep.pipeline.map_task import MapTask
from data_prep.pipeline.plan import Plan, absolute
from data_prep.storage import storage


def run_exclusions(plan: Plan, tasks: Sequence[MapTask], output: str, runner: PhaseRunner) -> None:
    """Write the exclusions of the plan; the existence of the file marks the phase as done."""
    url = storage.join(plan.work_folder(output), NAME)
    if storage.exists(url):
        return
    ids_by_reason: dict[str, np.ndarray] = {}
    if plan.parent is not None:
        _warn_of_unread_names(plan)
        removed = removed_ids(output, plan.parent)
        ids_by_reason["removed earlier"] = np.column_stack([removed, np.zeros_like(removed)])
        if plan.config.deduplication.exact:
            known = known_ids(output, plan.parent)
            ids_by_reason["in the data set already"] = np.column_stack([known, known])
    if plan.config.deduplication.near:
        ids_by_reason["near duplicate"] = _near_duplicates(plan, tasks, output, runner)
    if ids_by_reason:
        write_exclusions(url, ids_by_reason, plan.destinations.num_sections, plan.destinations.groups_of)


def _warn_of_unread_names(plan: Plan) -> None:
    """Warn where URLs or corpus ids were removed from the data set and the addition does not read them."""
    assert plan.parent is not None
    removals, documents = plan.parent.removals, plan.config.documents
    for number, noun, setting, field in (
        (sum(item.urls for item in removals), "URL", "documents.url_field", documents.url_field),
        (sum(item.corpus_ids for item in removals), "corpus id", "documents.id_field", documents.id_field),
    ):
        if number and not field:
            what = f"{counted(number, noun)} removed from the data set, and {setting} is not set"
            print(f"warning: {what}: documents of them are recognized by their text only", file=sys.stderr, flush=True)


def _near_duplicates(plan: Plan, tasks: Sequence[MapTask], output: str, runner: PhaseRunner) -> np.ndarray:
    settings = plan.config.deduplication
    work_folder = absolute(plan.work_folder(output))
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
    return [SignatureTask(absolute(output), shard, plan.config.deduplication, work_folder) for shard in shards]
