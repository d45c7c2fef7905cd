"""`python -m data_prep shards`: make a shard set of a corpus, or one range's share of it, or add to one."""

from __future__ import annotations

import argparse

import numpy as np

from data_prep.base.errors import UsageError
from data_prep.base.terminal import counted
from data_prep.commands.options import (
    Preparation,
    Request,
    add_shard_making,
    executor,
    preparation,
    requested,
    workers_for,
)
from data_prep.commands.stopping import stopping_on_signals
from data_prep.dataset.manifest import Manifest
from data_prep.estimate.estimate import estimate
from data_prep.estimate.estimate_report import estimate_report
from data_prep.estimate.startup import measure_start
from data_prep.pipeline.preparation import map_range, prepare_shards
from data_prep.pipeline.repair import find_damage, repair
from data_prep.pipeline.scale_plan import scale_plan
from data_prep.pipeline.shard_range import ShardRange
from data_prep.reports.stats_report import table_lines
from data_prep.reports.tables import source_table, split_table, step_table
from data_prep.storage import storage

HELP = "make a shard set of a corpus"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shard_making(parser)
    parser.add_argument(
        "--repair",
        action="store_true",
        help="check every file of the finished output, and rebuild those that are damaged from the same inputs",
    )
    parser.add_argument(
        "--shard-range",
        metavar="I/N",
        help="read only share I (from 1) of N, such as in an array of jobs; 'merge' does the rest once all are done",
    )


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Make the shards, and print what they hold.

    Raises:
        UserError: not all of it could be done.
    """
    shard_range = None if arguments.shard_range is None else ShardRange.parse(arguments.shard_range)
    if shard_range is not None and arguments.fresh:
        raise UsageError(
            "--fresh in one range would remove what the others have done; remove the output folder, or run 'merge' "
            "with --fresh, before all ranges"
        )
    if arguments.repair and (arguments.fresh or shard_range is not None):
        other = "--fresh" if arguments.fresh else "--shard-range"
        raise UsageError(f"--repair and {other} contradict each other. Fix: give one of them")
    request = requested(arguments, overrides)
    if arguments.repair:
        _repair(arguments, request)
        return
    if arguments.dry_run:
        asked, workers = preparation(request), workers_for(arguments, request)
        found = estimate(asked.plan, asked.tokenizer, measure_start(asked.tokenizer, workers))
        print("\n".join(estimate_report(asked.plan, found, workers, asked.output)))
        for name, num_tokens in (("100 billion", 1e11), ("1 trillion", 1e12)):
            planned = scale_plan(num_tokens, asked.plan.config, np.dtype(asked.tokenizer.token_dtype).itemsize)
            print("\n  ".join([f"a corpus of {name} tokens with these settings:", *planned.lines()]))
        return
    with stopping_on_signals(), executor(arguments, request) as where:
        asked = preparation(request)
        if shard_range is not None:
            is_work = map_range(asked.plan, asked.tokenizer, asked.output, where, shard_range)
            done = "is done" if is_work else "was done already"
            print(f"range {shard_range} {done}; once all are, 'python -m data_prep merge' does the rest")
            return
        made = prepare_shards(asked.plan, asked.tokenizer, asked.output, where, arguments.fresh)
    print_result(asked, *made)


def _repair(arguments: argparse.Namespace, request: Request) -> None:
    """Rebuild what is damaged, or with --dry-run only say what is."""
    place = storage.redact(request.output)
    with stopping_on_signals(), executor(arguments, request) as where:
        asked = preparation(request)
        if arguments.dry_run:
            _, problems = find_damage(asked.plan, asked.output, where)
            print("\n".join([*problems, f"{place}: would rebuild {counted(len(problems), 'file')}"]))
            return
        _, replaced = repair(asked.plan, asked.tokenizer, asked.output, where)
    print("\n".join([*(f"rebuilt {name}" for name in replaced), f"{place}: every file is as the manifest names it"]))


def print_result(asked: Preparation, manifest: Manifest, is_new: bool) -> None:
    """Say what the data set holds, and whether it did so before."""
    place = storage.redact(asked.output)
    if not is_new:
        print(f"{place} is complete already, of the same inputs, settings and tokenizer; nothing was done")
        print("its files have the sizes that the manifest names; 'python -m data_prep verify' reads their contents")
    for table in (split_table(manifest), step_table(manifest), source_table(manifest)):
        print("\n".join(table_lines(table)), end="\n\n")
    print(place)
