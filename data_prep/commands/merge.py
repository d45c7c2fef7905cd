"""`clozeworks merge`: Finish a data set that several jobs prepared with shards --shard-range.

Give the same inputs and settings as to the ranges. The command fails with the missing ranges if some are not done.
This command is about data; `clozeworks average` averages the checkpoints of a run.
"""

from __future__ import annotations

import argparse

from data_prep.api.prepare import plan_preparation
from data_prep.commands.shards import add_shard_making, executor, print_result, requested, stopping_on_signals
from data_prep.pipeline.job import Job
from data_prep.pipeline.map_phase import units_left
from data_prep.pipeline.preparation import clear, merge_ranges
from data_prep.pipeline.work_folder import refuse_to_undo_changes
from data_prep.storage import storage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shard_making(parser)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Do the remaining work and print what the data set holds; with --fresh, remove unfinished work instead."""
    request = requested(arguments, overrides)
    if not arguments.fresh and not arguments.dry_run:
        with stopping_on_signals(), executor(arguments, request) as where:
            preparation = plan_preparation(request)
            made = merge_ranges(preparation.plan, preparation.tokenizer, preparation.output, where)
        print_result(preparation, *made)
        return
    preparation = plan_preparation(request)
    output = storage.redact(preparation.output)
    if arguments.fresh:
        if request.parent is None:
            refuse_to_undo_changes(preparation.output)
        if not arguments.dry_run:
            clear(preparation.plan, preparation.tokenizer, preparation.output)
        print(f"{'would clear' if arguments.dry_run else 'cleared'} {output}; now run all of its ranges")
        return
    left = units_left(Job.of(preparation.plan, preparation.tokenizer, preparation.output), preparation.plan.units)
    print(f"would write the shards of {output}; {left} of {len(preparation.plan.units)} units are not done yet")
