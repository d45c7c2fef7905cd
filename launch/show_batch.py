"""Show what the model sees: `show_batch.py --config FILE [--rows 4] [section.field=value ...]`.

Prints rows of the training order as text: predicted places in brackets, documents and sentence pairs with their
labels, how full each row is. It reads the shards of `data.shards` and starts nothing.

--json prints one JSON object a row instead, padding rows left out:
    row, sample          number of the row in what is shown, and of the sample in the order of the epoch
    num_tokens           positions that hold a token; the others are padding
    input_ids, position_ids, token_type_ids
                         one number for each position of the row, after masking, padding included
    masked_positions     positions to predict, counted from 0 in the row
    labels               the original ids at these positions
    documents            {start, stop} of every sequence (a piece of a document, or a sentence pair), stop excluded
    pairs                {cls_position, label, meaning} of every sentence pair that has a label; else empty
"""

from __future__ import annotations

import argparse
import json
import sys

from data_prep.base.arguments import at_least
from data_prep.base.errors import UsageError, run_command
from data_prep.base.settings import load_settings
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import Tokenizer
from trainer.config.run_config import RunConfig
from trainer.config.schedule import masking_rate
from trainer.data.batch import Batch
from trainer.data.description import LEGEND, describe_batch, rows_as_data
from trainer.data.loader import Loader, Position
from trainer.data.sample_range import parse_ranges
from trainer.loop.data_version import open_data

PAIR_LABELS = {
    "none": ("", ""),
    "next_sentence": ("B is next", "B is from another document"),
    "sentence_order": ("in order", "swapped"),
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="show_batch.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file, or the name of a preset")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="settings that replace the file's")
    parser.add_argument("--rows", type=at_least(1), default=4, metavar="N", help="how many rows (default 4)")
    parser.add_argument(
        "--sample", type=at_least(0), default=0, metavar="N", help="the first row's place in the order (default 0)"
    )
    parser.add_argument("--samples", metavar="A:B", help="the rows A to B - 1, in place of --sample and --rows")
    parser.add_argument("--epoch", type=at_least(0), default=0, metavar="N", help="epoch, counted from 0 (default)")
    parser.add_argument(
        "--stage", type=at_least(0), default=0, metavar="N", help="stage of training, counted from 0 (default)"
    )
    parser.add_argument(
        "--step", type=at_least(0), default=0, metavar="N", help="step whose masking rate is used (default 0)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a row, for programs; fields as above")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="default: on a terminal")
    return parser.parse_intermixed_args(arguments)


def main() -> None:
    arguments = parse_arguments()
    choose_rows(arguments)
    config = load_settings(RunConfig, arguments.config, arguments.overrides)
    storage.configure(config.storage_options)
    batch, tokenizer = read_batch(config, arguments)
    pair_labels = PAIR_LABELS[config.data.sentence_pairs]
    if arguments.json:
        for row in rows_as_data(batch, pair_labels, arguments.sample):
            print(json.dumps(row, ensure_ascii=False))
        return
    color = arguments.color == "always" or (arguments.color == "auto" and sys.stdout.isatty())
    print(LEGEND, end="\n\n")
    for line in describe_batch(batch, tokenizer, pair_labels, color):
        print(line)


def choose_rows(arguments: argparse.Namespace) -> None:
    """Set `sample` and `rows` where `--samples` says them.

    Raises:
        UsageError: it is no range, or there are several.
    """
    if arguments.samples is None:
        return
    ranges = parse_ranges(arguments.samples, "--samples")
    if len(ranges) > 1:
        raise UsageError(f"--samples {arguments.samples} names {len(ranges)} ranges; show one at a time")
    ((first, stop),) = ranges
    arguments.sample, arguments.rows = first, stop - first


def read_batch(config: RunConfig, arguments: argparse.Namespace) -> tuple[Batch, Tokenizer]:
    """The rows asked for as one micro-batch, and the tokenizer of the shards.

    Raises:
        UsageError: there is no such stage, or no such row.
    """
    if arguments.stage >= len(config.stages):
        raise UsageError(f"--stage {arguments.stage} is not there: the run has stages 0 to {len(config.stages) - 1}")
    length = config.stages[arguments.stage].sequence_length
    stage = config.stages[arguments.stage].model_copy(
        update={
            "micro_batch_tokens": arguments.rows * length,
            "global_batch_tokens": arguments.rows * length,
            "batch_warmup": None,
        }
    )
    shard_sets = open_data(config)
    loader = Loader(
        shard_sets,
        config.data.model_copy(update={"num_workers": 0}),
        stage,
        Position(arguments.stage, arguments.epoch, arguments.sample),
        config.training.seed,
        0,
        1,
        lambda step: masking_rate(min(step, config.max_steps - 1), config.max_steps, config.data),
        arguments.step,
    )
    last = loader.num_samples(arguments.epoch)
    if last is not None and arguments.sample + arguments.rows > last:
        raise UsageError(
            f"epoch {arguments.epoch} has {last:,} rows; --sample {arguments.sample} with --rows {arguments.rows} goes "
            "beyond the last"
        )
    return next(iter(loader)).micro_batches[0], Tokenizer.load(shard_sets[0].tokenizer_folder)


if __name__ == "__main__":
    run_command(main)
