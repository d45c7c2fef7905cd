"""The gather and reduce phases: gathers groups if there are any, makes each shard, gives an empty valid split a
document.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from data_prep.base.errors import UserError
from data_prep.dataset.counts import SOURCE_COLUMNS
from data_prep.dataset.manifest_records import FileRecord, ShardRecord
from data_prep.dataset.shards import shard_name
from data_prep.documents.drops import Drop, drops_of_json
from data_prep.executors.phases import Counts, PhaseRunner, Tally, add_up_results, unpack_counts
from data_prep.pipeline.job import Job
from data_prep.pipeline.map_phase import MapSummary, counts_of_drops, dropped_in
from data_prep.pipeline.plan import Plan
from data_prep.pipeline.reduce_task import Shard, gather_group, gathered_url, reduce_shard, result_url
from data_prep.pipeline.sections import read_summary
from data_prep.storage.work_files import read_state


@dataclass(frozen=True)
class ShardTotals:
    """The results of the reduce phase.

    Attributes:
        shards: shards with documents, train first, by number.
        empty: names of files of shards without documents.
        detached_provenance: of shards without documents.
        dropped: of each source of the plan, documents dropped in these phases.
        source_counts: (num_sources, 5) documents, sentences, tokens, words and bytes of text of each source.
        token_counts: of train and valid, (vocab_size,) int64 how often each token id occurs.
        smallest: the smallest document id of train, its destination, and the number of documents there; None if train
            is empty.
    """

    shards: tuple[ShardRecord, ...]
    empty: tuple[str, ...]
    detached_provenance: tuple[FileRecord, ...]
    dropped: tuple[Counter[Drop], ...]
    source_counts: np.ndarray
    token_counts: dict[str, np.ndarray]
    smallest: tuple[int, int, int] | None

    def of_split(self, split: Literal["train", "valid"]) -> list[ShardRecord]:
        return [shard for shard in self.shards if shard.name.startswith(split)]


def gather(job: Job, summary: MapSummary, runner: PhaseRunner) -> MapSummary:
    """Gather the groups, if the plan has any; return the summary with the counts of each destination."""
    if not job.destinations.num_groups:
        return summary
    groups = range(job.destinations.num_groups)  # a shard of a source reads every group that may hold it
    sizes = summary.document_counts.tolist()

    def url(group: int) -> str:
        return gathered_url(job.work_folder, group)

    runner.run("gathering", job.task(gather_group), groups, url, sizes.__getitem__, ("documents", 1.0))
    tally = add_up_results(list(map(url, groups)), _of_group, job.work_folder, "groups", runner)
    found = tally.of("documents")
    counts = np.array([found[destination] for destination in range(len(job.destinations))], np.int64)
    dropped = tuple(map(operator.add, summary.dropped, dropped_in(tally, len(summary.dropped))))
    return dataclasses.replace(summary, document_counts=counts, dropped=dropped)


def make_shards(plan: Plan, job: Job, summary: MapSummary, first_shard: int, runner: PhaseRunner) -> ShardTotals:
    """Make every shard; shards of each split are numbered from `first_shard`.

    If all documents of a destination are dropped, its shard is empty and counts them. If train has documents and valid
    has none, the document with the smallest id (the hash nearest to valid) is held out, and its shard is rewritten
    without it. The data set of an addition has a valid split already, or none, as with shards.valid_fraction=0.

    Args:
        summary: as `gather` returns it.
    """
    shards = _shards(plan, summary, first_shard)
    totals = _run(job, shards, runner, "shards")
    if plan.parent is not None or totals.of_split("valid"):
        return totals
    if totals.smallest is None:
        raise nothing_to_train_on(plan)
    if not plan.destinations.valid_fraction:
        return totals
    _report_hold_out(plan, summary)
    shards, written = _with_one_held_out(plan, summary, first_shard, totals), totals
    totals = _run(job, shards, runner, f"shards-{totals.smallest[0]:016x}")
    if not totals.of_split("train"):
        raise nothing_to_train_on(plan)
    made = {shard.name for shard in totals.shards}
    surplus = {file.name for shard in written.shards if shard.name not in made for file in shard.files}
    surplus -= {file.name for file in totals.detached_provenance}  # rewritten for a shard that is empty now
    return dataclasses.replace(totals, empty=(*totals.empty, *sorted(surplus)))


def _with_one_held_out(plan: Plan, summary: MapSummary, first_shard: int, totals: ShardTotals) -> list[Shard]:
    """Return all shards, with the document of the smallest id in its own valid shard."""
    assert totals.smallest is not None
    identity, destination, num_documents = totals.smallest
    counts = summary.document_counts.copy()
    if num_documents == 1:
        counts[destination] = 0
    shards = _shards(plan, dataclasses.replace(summary, document_counts=counts), first_shard)
    (whole,) = _shards(plan, summary, first_shard, destination)
    number = first_shard + sum(shard.name.startswith("valid") for shard in shards)
    others = [
        dataclasses.replace(shard, without=identity) if shard.destination == destination else shard for shard in shards
    ]
    # Count copies of the document if no other shard of its destination counts them.
    alone = dataclasses.replace(whole, name=shard_name("valid", number), only=identity, counts_drops=num_documents == 1)
    return [*others, alone]


def nothing_to_train_on(plan: Plan) -> UserError:
    return UserError(
        "no document is left to train on: those that remain after deduplication are all in the valid split "
        f"(shards.valid_fraction={plan.destinations.valid_fraction:g})",
        fix="give more documents (of text files, documents.txt_documents=blank_lines makes one of each block), or set "
        "shards.valid_fraction=0, to train on all of them",
        code="nothing-to-train-on",
    )


def _shards(plan: Plan, summary: MapSummary, first_shard: int, only: int | None = None) -> list[Shard]:
    """Return a shard for each destination with documents, or for destination `only`."""
    numbers = {"train": first_shard, "valid": first_shard}
    shards = []
    for destination in np.flatnonzero(summary.document_counts).tolist():
        split = plan.destinations.split(destination)
        if only in (None, destination):
            shards.append(Shard(shard_name(split, numbers[split]), destination))
            numbers[split] += 1
    return shards


def _run(job: Job, to_make: Sequence[Shard], runner: PhaseRunner, name: str) -> ShardTotals:
    """Make the unfinished shards; return the totals of all."""
    url_of = functools.partial(result_url, job)
    runner.run("writing", job.task(reduce_shard), to_make, url_of, lambda shard: 1, ("shards", 1.0))
    tally = add_up_results(list(map(url_of, to_make)), _of_shard, job.work_folder, name, runner)
    records = sorted(map(ShardRecord.model_validate, tally.lists.get("shards", ())), key=lambda shard: shard.name)
    empty = [shard for shard in records if not shard.documents]
    no_sources = np.zeros((job.first_source + len(job.reading.names), len(SOURCE_COLUMNS)), np.int64)
    no_tokens = np.zeros(job.vocab_size, np.int64)
    return ShardTotals(
        shards=tuple(shard for shard in records if shard.documents),
        empty=tuple(file.name for shard in empty for file in (shard, shard.index)),
        detached_provenance=tuple(shard.provenance for shard in empty if shard.provenance is not None),
        dropped=dropped_in(tally, len(job.reading.names)),
        source_counts=tally.arrays.get("sources", no_sources),
        token_counts={split: tally.arrays.get(split, no_tokens) for split in ("train", "valid")},
        smallest=min(map(tuple, tally.lists.get("smallest", ())), default=None),
    )


def _of_shard(url: str) -> Tally:
    values = read_state(url)
    shard, smallest = values["shard"], values["smallest_id"]
    split = shard["name"].partition("-")[0]
    arrays = {"sources": np.array(values["source_counts"], np.int64), split: unpack_counts(values["token_counts"])}
    lists = {"shards": [shard]}
    if split == "train" and smallest is not None:
        lists["smallest"] = [[smallest, values["destination"], shard["documents"]]]
    return Tally(_drops(values), arrays, lists)


def _of_group(url: str) -> Tally:
    values, counts = read_summary(url)
    tally, held = Tally(_drops(values)), zip(values["members"], counts.tolist(), strict=True)
    tally.counts.update({("documents", destination): count for destination, count in held})
    return tally


def _drops(values: Mapping[str, Any]) -> Counts:
    counts: Counts = Counter()
    for source, *drop, count in values["dropped"]:  # of an earlier release without the step
        counts += counts_of_drops(source, drops_of_json([(*drop, count)] if drop[1:] else {drop[0]: count}))
    return counts


def _report_hold_out(plan: Plan, summary: MapSummary) -> None:
    destinations, counts = plan.destinations, summary.document_counts
    total, excluded = int(counts.sum()), int(counts[destinations.num_train :].sum())
    none = f"none of the {total} documents falls into the validation split by its hash"
    if excluded:
        none = f"no document of the validation split is left ({excluded} of {total}, all left out as duplicates)"
    print(
        f"note: {none} (shards.valid_fraction={destinations.valid_fraction:g}); the document "
        "with the nearest hash is held out",
        file=sys.stderr,
        flush=True,
    )
