"""`python -m data_prep merge`: make the shards once every range of `shards --shard-range` is done."""

from __future__ import annotations

import argparse

from data_prep.commands.options import add_shard_making, executor, preparation, requested
from data_prep.commands.shards import print_result
from data_prep.commands.stopping import stopping_on_signals
from data_prep.pipeline.map_phase import map_tasks, units_left
from data_prep.pipeline.preparation import clear, merge_ranges
from data_prep.storage import storage

HELP = "make the shards once every --shard-range is done"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shard_making(parser)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Do what is left, and print what the data set holds; with --fresh, remove what was begun instead.

    Raises:
        UserError: ranges are missing, or not all of it could be done.
    """
    request = requested(arguments, overrides)
    if not arguments.fresh and not arguments.dry_run:
        with stopping_on_signals(), executor(arguments, request) as where:
            asked = preparation(request)
            made = merge_ranges(asked.plan, asked.tokenizer, asked.output, where)
        print_result(asked, *made)
        return
    asked = preparation(request)
    place = storage.redact(asked.output)
    if arguments.fresh:
        if not arguments.dry_run:
            clear(asked.plan, asked.tokenizer, asked.output)
        print(f"{'would clear' if arguments.dry_run else 'cleared'} {place}; now run every range of it")
        return
    left = units_left(map_tasks(asked.plan, asked.tokenizer, asked.output))
    print(f"would make the shards of {place}; {left} of {len(asked.plan.units)} units are not read yet")
