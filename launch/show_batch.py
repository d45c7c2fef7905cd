"""Print training rows as text: what the model sees.

    clozeworks show-batch --config FILE [--rows 4] [section.field=value ...]
    clozeworks show-batch --text "A sentence of yours." --tokenizer DIR [--seed 0]

The command prints rows in training order, with masked tokens in brackets, documents and sentence pairs with their
labels, and the share of positions that hold tokens. It reads the shards of `data.shards` and writes nothing.

--text masks one text of yours, and prints a line per token: the piece, its id, the id that the model sees, the label
(-100 where nothing is predicted), and which of 80/10/10 it is: masked, random or unchanged. --config gives the masking
of a run, and without --tokenizer its tokenizer; without --config the masking is that of BERT.

--json prints one JSON object per row instead, without padding rows:
    row, sample          number of the row in the output, and of the sample in the order of the epoch
    num_tokens           positions that hold a token; the others are padding
    input_ids, position_ids, token_type_ids
                         one number per position of the row, after masking, with padding
    masked_positions     positions to predict, counted from 0 in the row; with the objective causal those before them
    labels               the original ids of the predicted tokens
    documents            {start, stop} of every sequence (part of a document, or a sentence pair), stop exclusive
    pairs                {cls_position, label, meaning} of every labeled sentence pair; otherwise empty
With --text the one object has rate and seed, and lists of a value per token: pieces, ids, input_pieces, input_ids,
labels and treatments (null where nothing is predicted).
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from data_prep.base.arguments import at_least
from data_prep.base.errors import UsageError, run_command
from data_prep.base.load_settings import load_settings
from data_prep.base.terminal import counted, json_line, printable
from launch.options import add_config, check_utf8, command_parser, unknown_stage
from trainer.config.run_config import RunConfig
from trainer.data.sample_range import parse_ranges

if TYPE_CHECKING:
    from data_prep.tokenizer.tokenizer import Tokenizer
    from trainer.config.data_settings import DataSettings
    from trainer.data.batch import Batch
    from trainer.data.masker import MaskedExample

PAIR_LABELS = {
    "none": ("", ""),
    "next_sentence": ("B is next", "B is from another document"),
    "sentence_order": ("in order", "swapped"),
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("show_batch.py", __doc__)
    add_config(parser, required=False)
    text = parser.add_argument_group("one text")
    text.add_argument("--text", metavar="TEXT", help="mask this text instead of printing rows")
    text.add_argument("--tokenizer", metavar="DIR", help="tokenizer of --text (default: as in the configuration)")
    text.add_argument("--seed", type=at_least(0), metavar="N", help="seed of the masks of --text (default 0)")
    rows = parser.add_argument_group("rows")
    rows.add_argument("--rows", type=at_least(1), metavar="N", help="number of rows (default 4)")
    rows.add_argument(
        "--sample", type=at_least(0), metavar="N", help="first row, by its index in the epoch (default 0)"
    )
    rows.add_argument("--samples", metavar="A:B", help="rows A to B - 1, instead of --sample and --rows")
    rows.add_argument(
        "--epoch", type=at_least(0), default=0, metavar="N", help="epoch of the stage's data, from 0 (default 0)"
    )
    rows.add_argument(
        "--stage", type=at_least(0), default=0, metavar="N", help="stage of the recipe, counted from 0 (default 0)"
    )
    rows.add_argument(
        "--step", type=at_least(0), default=0, metavar="N", help="step whose masking rate is used (default 0)"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object per row, with the fields above")
    output.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="default: color on a terminal"
    )
    read = parser.parse_intermixed_args(arguments)
    if read.config is None and read.text is None:
        parser.error("give --config FILE for rows of a run, or --text TEXT for one text")
    if read.config is None and read.tokenizer is None:
        parser.error("--text without --config needs --tokenizer DIR")
    if read.config is None and read.overrides:
        parser.error(f"{read.overrides[0]} overrides a configuration, and none is given: give --config FILE")
    return read


def main() -> None:
    arguments = parse_arguments()
    check_one_of_both(arguments)
    if arguments.text is not None:
        show_text(arguments)
        return
    choose_rows(arguments)
    config = load_settings(RunConfig, arguments.config, arguments.overrides)
    from data_prep.storage import storage
    from trainer.checkpoint.data_version import with_epochs_counted
    from trainer.data.description import LEGEND, describe_batch, rows_as_data

    storage.configure(config.storage_options)
    config = with_epochs_counted(config)
    batch, tokenizer = read_batch(config, arguments)
    pair_labels = PAIR_LABELS[config.stages[arguments.stage].data.sentence_pairs]
    if arguments.json:
        for row in rows_as_data(batch, pair_labels, arguments.sample):
            print(json_line(row))
        return
    color = arguments.color == "always" or (arguments.color == "auto" and sys.stdout.isatty())
    print(LEGEND, end="\n\n")
    for line in describe_batch(batch, tokenizer, pair_labels, color):
        print(line)


def check_one_of_both(arguments: argparse.Namespace) -> None:
    """Check that options of rows and of one text are not mixed.

    Raises:
        UsageError: they are.
    """
    of_rows, of_text = ("rows", "sample", "samples"), ("tokenizer", "seed")
    chosen, others = ("rows of a run", of_text) if arguments.text is None else ("--text", of_rows)
    given = [f"--{name}" for name in others if getattr(arguments, name) is not None]
    if given:
        raise UsageError(
            f"{' and '.join(given)} cannot be used with {chosen}",
            fix=f"leave {' and '.join(given)} out",
            code="contradicting-options",
        )


def show_text(arguments: argparse.Namespace) -> None:
    """Print one text as training masks it.

    Raises:
        UsageError: it has no tokens, the stage does not exist, or the objective of the run masks nothing.
    """
    check_utf8([arguments.text])
    from trainer.data.masker import mask_text

    data, rate, tokenizer = masking_of_text(arguments)
    seed = arguments.seed or 0
    masked = mask_text(arguments.text, tokenizer, data, rate, seed)
    if arguments.json:
        print(json_line(text_as_data(masked, seed)))
        return
    predicted = sum(token.treatment is not None for token in masked.tokens)
    print(
        f"{counted(len(masked.tokens) - 2, 'token')}, {predicted} to predict (rate {masked.rate:.3g}, seed {seed}): "
        f"{masked.count('masked')} masked, {masked.count('random')} random, {masked.count('unchanged')} unchanged\n"
    )
    for line in table_of(masked):
        print(line)
    if not predicted:
        print(f"\nno token is predicted: {masked.rate:.3g} of so few tokens is less than one; try another --seed")


def masking_of_text(arguments: argparse.Namespace) -> tuple[DataSettings, float, Tokenizer]:
    """Return the masking settings of --text, the masking rate, and the tokenizer."""
    from data_prep.storage import storage
    from data_prep.tokenizer.tokenizer import Tokenizer
    from trainer.config.data_settings import DataSettings

    if arguments.config is None:
        data = DataSettings(shards="none")  # of which only the masking is used: that of BERT
        return data, data.mlm_probability, Tokenizer.load(arguments.tokenizer)
    config = load_settings(RunConfig, arguments.config, arguments.overrides)
    if arguments.stage >= len(config.stages):
        raise unknown_stage(arguments.stage, len(config.stages))
    stage = config.stages[arguments.stage]
    if stage.is_causal:
        raise UsageError(
            f"stage {arguments.stage} of the run predicts every token from the tokens before it, without masks",
            fix="choose another --stage, or leave --config out for the masking of BERT",
            code="nothing-is-masked",
        )
    storage.configure(config.storage_options)
    if arguments.tokenizer is not None:
        tokenizer = Tokenizer.load(arguments.tokenizer)
    else:
        from trainer.checkpoint.data_version import open_data, with_epochs_counted

        tokenizer = Tokenizer.load(open_data(with_epochs_counted(config))[0].tokenizer_folder)
    return stage.data, stage.masking_rate(max(arguments.step, stage.first_step)), tokenizer


def text_as_data(masked: MaskedExample, seed: int) -> dict[str, Any]:
    tokens = masked.tokens
    return {
        "rate": masked.rate,
        "seed": seed,
        "pieces": [token.piece for token in tokens],
        "ids": [token.token_id for token in tokens],
        "input_pieces": [token.input_piece for token in tokens],
        "input_ids": [token.input_id for token in tokens],
        "labels": [token.label for token in tokens],
        "treatments": [token.treatment for token in tokens],
    }


def table_of(masked: MaskedExample) -> list[str]:
    """Return the lines of a table with a row per token."""
    header = ("position", "piece", "id", "model sees", "input id", "label", "")
    rows = [
        (
            str(position),
            printable(token.piece),
            str(token.token_id),
            printable(token.input_piece),
            str(token.input_id),
            str(token.label),
            token.treatment or "",
        )
        for position, token in enumerate(masked.tokens)
    ]
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    return [
        f"{position:>{widths[0]}}  {piece:<{widths[1]}}  {token_id:>{widths[2]}}  {seen:<{widths[3]}}  "
        f"{seen_id:>{widths[4]}}  {label:>{widths[5]}}  {treatment}".rstrip()
        for position, piece, token_id, seen, seen_id, label, treatment in (header, *rows)
    ]


def choose_rows(arguments: argparse.Namespace) -> None:
    """Set `sample` and `rows` from `--samples`, if given, else to what they are by default.

    Raises:
        UsageError: it is not one range, or the others are given too.
    """
    given = [f"--{name}" for name in ("sample", "rows") if getattr(arguments, name) is not None]
    if arguments.samples is None:
        arguments.sample, arguments.rows = arguments.sample or 0, arguments.rows or 4
        return
    if given:
        raise UsageError(
            f"--samples {arguments.samples} and {' and '.join(given)} both choose the rows",
            fix=f"leave {' and '.join(given)} out",
            code="contradicting-options",
        )
    ranges = parse_ranges(arguments.samples, "--samples")
    if len(ranges) > 1:
        raise UsageError(
            f"--samples {arguments.samples} contains {len(ranges)} ranges", fix="give one range", code="several-ranges"
        )
    ((first, stop),) = ranges
    arguments.sample, arguments.rows = first, stop - first


def read_batch(config: RunConfig, arguments: argparse.Namespace) -> tuple[Batch, Tokenizer]:
    """Return the requested rows as one micro-batch, and the tokenizer of the shards.

    Raises:
        UsageError: the stage or a row does not exist.
    """
    from data_prep.tokenizer.tokenizer import Tokenizer
    from trainer.checkpoint.data_version import newest_saved, open_data
    from trainer.checkpoint.format import TrainState
    from trainer.data.loader import Loader
    from trainer.loop.global_batches import start_of_stage

    if arguments.stage >= len(config.stages):
        raise unknown_stage(arguments.stage, len(config.stages))
    length = config.stages[arguments.stage].sequence_length
    stage = replace(
        config.stages[arguments.stage],
        micro_batch_tokens=arguments.rows * length,
        global_batch_tokens=arguments.rows * length,
        batch_warmup=None,
        data=config.stages[arguments.stage].data.model_copy(update={"num_workers": 0}),
    )
    shard_sets = open_data(config)
    saved = newest_saved(config.output_dir, config.checkpoint.upload_to)
    start = start_of_stage(config, shard_sets, arguments.stage, TrainState() if saved is None else saved.state)
    epoch = start.first_epoch + arguments.epoch
    position = replace(start, epoch=epoch, next_sample=arguments.sample)
    loader = Loader(shard_sets, stage, position, config.training.seed, step=arguments.step)
    last = loader.num_samples(epoch)
    if last is None and arguments.epoch:
        raise UsageError(
            f"--epoch {arguments.epoch} has no meaning for a mixture, which numbers its samples without epochs",
            fix="remove it, and give the number of the sample",
            code="epoch-of-a-mixture",
        )
    if last is not None and arguments.sample + arguments.rows > last:
        raise UsageError(
            f"--sample {arguments.sample} with --rows {arguments.rows} exceeds the {last:,} rows of epoch "
            f"{arguments.epoch}",
            fix=f"give rows below {last}",
            code="sample-out-of-range",
        )
    return next(iter(loader)).micro_batches[0], Tokenizer.load(shard_sets[0].tokenizer_folder)


if __name__ == "__main__":
    run_command(main)
