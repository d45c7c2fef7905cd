"""Preparation of a data set: encodes every unit, finds documents to drop, writes every shard, publishes.

Unfinished work is in OUTPUT/.work. A stopped run resumes from the finished units. The result has the same bytes for any
number of interruptions, processes and machines.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from data_prep.base.errors import UserError
from data_prep.base.logs import logger
from data_prep.dataset.file_checks import file_tasks, size_problems
from data_prep.dataset.manifest import Manifest
from data_prep.executors.executors import Executor
from data_prep.executors.phases import PhaseRunner
from data_prep.pipeline.document_folders import check_folders, check_folders_written, remove_folders, write_folders
from data_prep.pipeline.exclusion_phase import NEAR, run_exclusions
from data_prep.pipeline.job import Job
from data_prep.pipeline.map_phase import (
    MapSummary,
    check_all_mapped,
    check_sources,
    run_map,
    summarize,
    units_left,
    units_of_range,
    warn_of_source,
)
from data_prep.pipeline.map_task import INPUT_CHANGED
from data_prep.pipeline.plan import Plan, check_output_apart, plan_again, warn_of_names
from data_prep.pipeline.publication import is_own_tokenizer, publish_shards, source_budgets, train_tokens_by_source
from data_prep.pipeline.reduce_phase import ShardTotals, gather, make_shards
from data_prep.pipeline.units import ShardRange
from data_prep.pipeline.work_folder import (
    begin_work,
    finished_manifest,
    forget_empty_work,
    has_begun,
    note_num_ranges,
    noted_num_ranges,
    preparations_in,
    record_stamps,
    refuse_to_undo_changes,
    remove_outputs,
    remove_unfinished,
    remove_work,
    settle_work,
    unfinished_preparation,
)
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import Tokenizer

_SHOWN = 5
_MOST_READINGS = 5  # of inputs that change while they are read
_MOST_NEAR_DUPLICATES = 0.9
"""Share of a source's documents; a source that loses more of them to near-duplicate search is warned about."""


def prepare_shards(
    plan: Plan, tokenizer: Tokenizer, output: str, executor: Executor | int, fresh: bool = False
) -> tuple[Manifest, bool]:
    """Make the data set that `plan` describes in the folder `output`; return its manifest, and whether it is new."""
    check_output_apart(plan, output)
    if not fresh and (manifest := _complete_unlocked(plan, output)) is not None:
        return manifest, False
    with storage.hold_lock(output) as lock:
        if fresh:
            _start_over(plan, tokenizer, output)
        manifest = _complete_already(plan, output)
        if manifest is not None:
            return manifest, False
        check_folders(plan, output, unfinished_preparation(output))
        remove_unfinished(plan, output)
        forget_empty_work(plan, output)
        begin_work(plan, output, is_alone=True)
        warn_of_names(plan)
        runner = PhaseRunner(executor, lock)
        plan = _map_inputs(plan, tokenizer, output, runner, None)
        return _finish(plan, tokenizer, output, runner), True


def map_range(plan: Plan, tokenizer: Tokenizer, output: str, executor: Executor | int, shard_range: ShardRange) -> bool:
    """Run the map phase of one range; return whether there was work to do.

    All ranges of an array may run at once, on machines that share only inputs, tokenizer and output.
    """
    check_output_apart(plan, output)
    if _complete_unlocked(plan, output) is not None:
        return False
    with storage.hold_lock(output, shard_range.name) as lock:
        if finished_manifest(plan, output) is not None:
            return False
        check_folders(plan, output, unfinished_preparation(output))
        begin_work(plan, output)
        note_num_ranges(plan, output, shard_range.num_ranges)
        is_work = units_left(Job.of(plan, tokenizer, output), units_of_range(plan.units, shard_range)) > 0
        _map_inputs(plan, tokenizer, output, PhaseRunner(executor, lock), shard_range)
        return is_work


def merge_ranges(plan: Plan, tokenizer: Tokenizer, output: str, executor: Executor | int) -> tuple[Manifest, bool]:
    """Do the remaining work once every range is done; return as `prepare_shards`."""
    check_output_apart(plan, output)
    if (manifest := _complete_unlocked(plan, output)) is not None:
        return manifest, False
    with storage.hold_lock(output) as lock:
        manifest = _complete_already(plan, output)
        if manifest is not None:
            return manifest, False
        check_folders(plan, output, unfinished_preparation(output))
        job = Job.of(plan, tokenizer, output)
        if not has_begun(output):  # without a recorded plan, for which ranges of other settings would be refused
            check_all_mapped(job, plan.units, None)
        begin_work(plan, output)
        remove_unfinished(plan, output)
        check_all_mapped(job, plan.units, noted_num_ranges(plan, output))
        warn_of_names(plan)
        return _finish(plan, tokenizer, output, PhaseRunner(executor, lock)), True


def _map_inputs(
    plan: Plan, tokenizer: Tokenizer, output: str, runner: PhaseRunner, shard_range: ShardRange | None
) -> Plan:
    """Read all inputs, or those of a range, and again those that change meanwhile; return the plan of what was read."""
    for _ in range(_MOST_READINGS):
        if shard_range is None:
            settle_work(plan, output)
        job, is_read = Job.of(plan, tokenizer, output), True
        try:
            run_map(job, plan.units if shard_range is None else units_of_range(plan.units, shard_range), runner)
        except UserError as error:
            if error.code != INPUT_CHANGED:
                raise
            is_read = False
        now = plan_again(plan, tokenizer)
        if now is plan and is_read:
            return plan
        changed = sorted({storage.redact(file.url) for file in {*plan.inputs} ^ {*now.inputs}})
        which = f" ({', '.join(changed[:_SHOWN])}{' ...' if changed[_SHOWN:] else ''})" if changed else ""
        logger(__name__).warning(f"inputs changed while they were read{which}: their units are read again")
        plan = now
        check_output_apart(plan, output)
        begin_work(plan, output, is_alone=shard_range is None)
    raise UserError(
        f"inputs changed while they were read, {_MOST_READINGS} times{which}",
        fix="run the same command again once they are complete: finished units of other files are kept",
        code=INPUT_CHANGED,
    )


def clear(plan: Plan, tokenizer: Tokenizer, output: str) -> None:
    """Remove what preparations wrote into `output`, so that all ranges start over."""
    with storage.hold_lock(output):
        _start_over(plan, tokenizer, output)


def _start_over(plan: Plan, tokenizer: Tokenizer, output: str) -> None:
    """Remove the files of preparations in `output`, and their documents from the folders for those."""
    if plan.parent is None:
        refuse_to_undo_changes(output)
        replaced = preparations_in(output)
        check_folders(plan, output, replaced)
        remove_folders(plan, replaced)
    else:
        check_folders(plan, output)
    remove_outputs(plan, output, keep_tokenizer=is_own_tokenizer(tokenizer, output))


def _complete_unlocked(plan: Plan, output: str) -> Manifest | None:
    """Return the manifest if `output`, where writing may be forbidden, holds this plan's result; None otherwise.

    The lock, whose file could not be made there, is not needed: nothing will be written. That a store forbids writing
    shows only at the attempt, so a finished set in a store is read without a lock, unless a killed run left work.
    """
    if not storage.is_remote(output) and os.access(storage.local_path(output), os.W_OK):
        return None
    manifest = finished_manifest(plan, output)
    if manifest is not None and storage.is_remote(output) and has_begun(output):
        return None
    if manifest is not None:
        _check_sizes(manifest, output)
        check_folders_written(plan)
    return manifest


def _complete_already(plan: Plan, output: str) -> Manifest | None:
    """Return the manifest if `output` holds this plan's result, after removing remains of a killed run; else None."""
    manifest = finished_manifest(plan, output)
    if manifest is not None:
        remove_work(plan, output)
        record_stamps(plan, output)  # an earlier release recorded none, and a file may have been touched
        _check_sizes(manifest, output)
        check_folders_written(plan)
    return manifest


def _check_sizes(manifest: Manifest, output: str) -> None:
    """Check that the files of a finished data set exist with the sizes in the manifest."""
    problems = size_problems(file_tasks(output, manifest))
    if problems:
        listed = "; ".join(problems[:_SHOWN]) + (f" and {len(problems) - _SHOWN} more" if problems[_SHOWN:] else "")
        raise UserError(
            f"{storage.redact(output)} was finished and is damaged: {listed}",
            fix="restore the files from a copy, or run the same command with another --output (in Python: output=) and "
            "copy them from there: it makes the same bytes",
            code="damaged-data-set",
        )


def _finish(plan: Plan, tokenizer: Tokenizer, output: str, runner: PhaseRunner) -> Manifest:
    """Run everything after the map phase."""
    job, first_shard = Job.of(plan, tokenizer, output), settle_work(plan, output)
    mapped, later = summarize(plan, job, runner), job.without_filters()
    run_exclusions(plan, later, runner)
    summary = gather(later, mapped, runner)
    totals = make_shards(plan, later, summary, first_shard, runner)
    _check_sources(plan, mapped, summary, totals)
    _report_repetition(plan, train_tokens_by_source(plan, totals))
    runner.lock.check()
    remove_unfinished(plan, output)  # of killed workers
    write_folders(plan, later, output, summary, runner)
    record_stamps(plan, output)
    manifest = publish_shards(plan, tokenizer, output, summary, totals)
    remove_work(plan, output)
    return manifest


def _report_repetition(plan: Plan, train_tokens: Sequence[int]) -> None:
    """Warn about each source that has to be repeated for its share of `total_tokens`."""
    if plan.config.total_tokens is None:
        return
    budgets = source_budgets(plan.config, train_tokens)
    for source, tokens, budget in zip(plan.config.sources, train_tokens, budgets, strict=True):
        if not source.has_own_budget and budget is not None and budget > tokens > 0:
            what = f"its share of total_tokens is {budget:,}, so a run of them repeats it {budget / tokens:,.2f} times"
            warn_of_source(source, f"it has {tokens:,} tokens to train on and {what}")


def _check_sources(plan: Plan, mapped: MapSummary, summary: MapSummary, totals: ShardTotals) -> None:
    """Warn about sources whose documents are all, or nearly all, duplicates; empty sources were reported before."""
    dropped = [first + later for first, later in zip(summary.dropped, totals.dropped, strict=True)]
    held = totals.source_counts[plan.first_source :, 0].tolist()
    is_known = [now == before for now, before in zip(dropped, mapped.dropped, strict=True)]
    check_sources(plan, dropped, [count or int(known) for count, known in zip(held, is_known, strict=True)], {})
    for source, reasons, count in zip(plan.config.sources, dropped, held, strict=True):
        near = reasons[NEAR]
        if count and near > _MOST_NEAR_DUPLICATES * (near + count):
            share = f"{near:,} of its {near + count:,} documents were dropped as near-duplicates"
            setting = f"deduplication.threshold={plan.config.deduplication.threshold:g}"
            advice = f"a chain of similar documents keeps its first one; compare some, or raise {setting}"
            warn_of_source(source, f"{share}: {advice}")
