"""The second phase as a whole: one task for each shard, and the document that makes up an empty validation split."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from data_prep.base.errors import UserError
from data_prep.dataset.shards import shard_name
from data_prep.deduplication.exclusions import NAME, read_exclusions
from data_prep.executors.phases import PhaseRunner
from data_prep.pipeline.map_phase import MapSummary
from data_prep.pipeline.map_task import sections_url
from data_prep.pipeline.plan import Plan, absolute
from data_prep.pipeline.reduce_task import ReduceResult, ReduceTask, read_result, reduce_shard, result_url
from data_prep.pipeline.sections import read_sizes
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import Tokenizer


def reduce_tasks(
    plan: Plan, tokenizer: Tokenizer, output: str, summary: MapSummary, first_shard: int
) -> list[ReduceTask]:
    """One task for each destination that has documents; the shards of each split are numbered from `first_shard`.

    A destination all of whose documents are excluded has a task too, which counts them by source and reason.

    Raises:
        UserError: no document is left to train on beside the held-out one.
    """
    destinations, settings = plan.destinations, plan.config.shards
    counts = summary.document_counts.copy()
    stand_in = _stand_in(plan, output, summary)
    if stand_in is not None:
        _take_from_train(plan, output, counts, stand_in)
    whole: list[tuple[int, int | None]] = [(destination, None) for destination in np.flatnonzero(counts).tolist()]
    alone = [] if stand_in is None else [(destinations.of(stand_in), stand_in)]
    num_train = int(np.count_nonzero(counts[: destinations.num_train]))
    tasks: list[ReduceTask] = []
    numbers = {"train": first_shard, "valid": first_shard}
    for destination, only in [*whole[:num_train], *alone, *whole[num_train:]]:
        split = destinations.split(destination) if only is None else "valid"
        tasks.append(
            ReduceTask(
                name=shard_name(split, numbers[split]),
                destination=destination,
                unit_sources=tuple(plan.first_source + unit.source for unit in plan.units),
                num_sources=plan.first_source + len(plan.config.sources),
                record_tokens=settings.record_tokens,
                seed=settings.seed,
                exact_deduplication=plan.config.deduplication.exact,
                vocab_size=tokenizer.vocab_size,
                token_dtype=dtype_name(tokenizer),
                tokenizer_folder=absolute(tokenizer.url),
                tokenizer_fingerprint=tokenizer.fingerprint,
                work_folder=absolute(plan.work_folder(output)),
                output_folder=absolute(output),
                only=only,
                without=stand_in if only is None else None,
            )
        )
        numbers[split] += 1
    return tasks


def run_reduce(tasks: Sequence[ReduceTask], runner: PhaseRunner) -> list[ReduceResult]:
    """Do the tasks that are not done; returns the results of all."""
    runner.run("writing", reduce_shard, tasks, result_url, lambda task: 1, ("shards", 1.0))
    return [read_result(task) for task in tasks]


def dtype_name(tokenizer: Tokenizer) -> Literal["uint16", "uint32"]:
    return "uint16" if np.dtype(tokenizer.token_dtype) == np.uint16 else "uint32"


def _stand_in(plan: Plan, output: str, summary: MapSummary) -> int | None:
    """The document that is held out because no document's hash says so: that of the smallest id, the next to say so.

    None where some are held out by their hash, and for an addition, whose data set holds out some already.
    """
    if plan.parent is not None:
        return None
    first_valid = plan.destinations.num_train
    excludes = storage.exists(storage.join(plan.work_folder(output), NAME))
    if summary.document_counts[first_valid:].any():
        valid = range(first_valid, len(plan.destinations))
        if not excludes or any(len(_surviving_ids(plan, output, number)) for number in valid):
            return None
    if not excludes:
        return summary.smallest_id
    surviving = (_surviving_ids(plan, output, number) for number in range(first_valid))
    smallest = [int(ids.min()) for ids in surviving if len(ids)]
    return min(smallest, default=None)


def _take_from_train(plan: Plan, output: str, counts: np.ndarray, document_id: int) -> None:
    """Take the document that is held out from the counts of its train shard, and tell of it."""
    destinations = plan.destinations
    total, excluded = int(counts.sum()), int(counts[destinations.num_train :].sum())
    none = f"none of the {total} documents falls into the validation split by its hash"
    if excluded:
        none = f"no document of the validation split is left ({excluded} of {total}, all left out as duplicates)"
    print(
        f"note: {none} (shards.valid_fraction={destinations.valid_fraction:g}); the one whose hash is nearest "
        "to it is held out",
        file=sys.stderr,
        flush=True,
    )
    destination = destinations.of(document_id)
    for ids in _ids(plan, output, destination):
        counts[destination] -= int((ids == np.uint64(document_id)).sum())
    if not counts[: destinations.num_train].any():
        raise nothing_to_train_on(plan)


def nothing_to_train_on(plan: Plan) -> UserError:
    return UserError(
        "after duplicates no document is left to train on beside the held-out ones "
        f"(shards.valid_fraction={plan.destinations.valid_fraction:g}); give more documents"
    )


def _surviving_ids(plan: Plan, output: str, destination: int) -> np.ndarray:
    excluded = read_exclusions(storage.join(plan.work_folder(output), NAME), destination)
    ids = np.concatenate([np.empty(0, np.uint64), *_ids(plan, output, destination)])
    return ids[~np.isin(ids, np.concatenate([np.empty(0, np.uint64), *excluded.values()]))]


def _ids(plan: Plan, output: str, destination: int) -> Iterator[np.ndarray]:
    for number in range(len(plan.units)):
        yield read_sizes(sections_url(plan.work_folder(output), number), destination)[0]
