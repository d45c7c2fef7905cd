"""Fit a pretrained encoder to labeled text, and see what the pretraining was worth.

    finetune.py --model models:/NAME@ALIAS --task classification --train train.tsv --test dev.tsv \\
        --text-column sentence --label-column label --compare scratch,frozen,full --output fitted

A file that is not given is cut from --train, by seed, every class in proportion: without --valid and --test both, a
tenth each. The learning rate and the epoch are chosen by the valid score, scores are computed on the test examples (of
the valid ones where there is --valid and no --test). OUTPUT/model loads in transformers without this project;
OUTPUT/report.txt is what is printed at the end, OUTPUT/scores.json its figures, OUTPUT/curves.png the curves. No
deepspeed is needed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.base.arguments import Joined, local_output
from data_prep.base.errors import UsageError, run_command
from launch.options import add_model, add_no_quoting, add_tracking_uri, check_new_folder, command_parser

if TYPE_CHECKING:
    from trainer.finetuning.finetune import FinetuneSettings, Variant

TASKS = ("classification", "pair_classification", "regression", "token_classification", "question_answering")
VARIANTS: tuple[Variant, ...] = ("scratch", "frozen", "full")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("finetune.py", __doc__)
    add_model(parser)
    parser.add_argument("--task", required=True, choices=TASKS, metavar="TASK", help=", ".join(TASKS))
    data = parser.add_argument_group("labeled data: tsv, csv, jsonl or parquet")
    data.add_argument("--train", required=True, type=Path, metavar="FILE", help="examples to fit to")
    data.add_argument("--valid", type=Path, metavar="FILE", help="chooses learning rate and epoch")
    data.add_argument("--test", type=Path, metavar="FILE", help="the data the reported scores are computed on")
    data.add_argument(
        "--text-column", required=True, metavar="NAME", help="text; words (list, or parted by spaces); context"
    )
    data.add_argument("--pair-column", metavar="NAME", help="second text of a pair; question")
    data.add_argument("--label-column", required=True, metavar="NAME", help="class; number; tags; answer (as in SQuAD)")
    add_no_quoting(data)
    data.add_argument("--max-length", type=int, metavar="N", help="tokens at most (default: what the model takes)")
    how = parser.add_argument_group("how it is fitted")
    variant = how.add_mutually_exclusive_group()
    variant.add_argument("--freeze-encoder", action="store_true", help="train the head alone, on stored features")
    variant.add_argument("--from-scratch", action="store_true", help="train encoder and head from random weights")
    variant.add_argument(
        "--compare", action=Joined, metavar="A,B,...", help=f"several of {', '.join(VARIANTS)} side by side"
    )
    how.add_argument("--seeds", type=int, default=3, metavar="N", help="fits with seeds 0 to N-1 (default 3)")
    how.add_argument(
        "--learning-rates",
        type=float,
        nargs="+",
        action="extend",
        metavar="RATE",
        help="tried by the first seed, each (default: by what is fitted)",
    )
    how.add_argument("--epochs", type=int, default=3, metavar="N", help="default 3")
    how.add_argument("--batch-size", type=int, default=32, metavar="N", help="examples a step (default 32)")
    how.add_argument(
        "--early-stopping",
        type=int,
        metavar="N",
        help="end after N epochs without a better valid score (default: never)",
    )
    how.add_argument("--metric", metavar="NAME", help="what chooses (default: accuracy, spearman or f1, by the task)")
    how.add_argument("--split-seed", type=int, default=0, metavar="N", help="which examples are cut (default 0)")
    out = parser.add_argument_group("where it goes")
    out.add_argument(
        "--output",
        type=local_output("--output"),
        default=Path("fitted"),
        metavar="DIR",
        help="a new folder (default ./fitted)",
    )
    out.add_argument("--register", metavar="NAME", help="register the best model under this name")
    out.add_argument("--alias", metavar="ALIAS", help="with --register: alias that is to point to it")
    add_tracking_uri(out)
    out.add_argument("--experiment", default="finetuning", metavar="NAME", help="of MLflow (default finetuning)")
    out.add_argument("--no-tracking", action="store_true", help="log nothing to MLflow")
    out.add_argument("--dry-run", action="store_true", help="read, check and estimate, but fit and write nothing")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse_arguments()
    from trainer.finetuning.finetune import check_settings, fit_experiment, prepare_experiment

    settings = settings_of(arguments)
    check_settings(settings)
    check_new_folder(arguments.output, "--output")
    experiment = prepare_experiment(settings, log)
    if arguments.dry_run:
        log("dry run: nothing was fitted and nothing was written")
        return
    fit_experiment(settings, experiment, log)


def settings_of(arguments: argparse.Namespace) -> FinetuneSettings:
    """What the command line asks for.

    Raises:
        UsageError: a variant is unknown.
    """
    from trainer.finetuning.examples import Columns
    from trainer.finetuning.finetune import FinetuneSettings
    from trainer.finetuning.task_data import Files

    return FinetuneSettings(
        model=arguments.model,
        task=arguments.task,
        files=Files(arguments.train, arguments.valid, arguments.test, not arguments.no_quoting),
        columns=Columns(arguments.text_column, arguments.pair_column, arguments.label_column),
        output=arguments.output,
        variants=chosen_variants(arguments),
        num_seeds=arguments.seeds,
        epochs=arguments.epochs,
        batch_size=arguments.batch_size,
        early_stopping=arguments.early_stopping,
        learning_rates=tuple(arguments.learning_rates or ()),
        metric=arguments.metric,
        max_length=arguments.max_length,
        split_seed=arguments.split_seed,
        tracking_uri=arguments.tracking_uri,
        is_tracked=not arguments.no_tracking,
        experiment=arguments.experiment,
        register=arguments.register,
        alias=arguments.alias,
    )


def chosen_variants(arguments: argparse.Namespace) -> tuple[Variant, ...]:
    """The ways to fit that the command line asks for.

    Raises:
        UsageError: one is unknown.
    """
    if arguments.compare is None:
        return ("frozen",) if arguments.freeze_encoder else ("scratch",) if arguments.from_scratch else ("full",)
    names = tuple(dict.fromkeys(name.strip() for name in arguments.compare.split(",") if name.strip()))
    known = tuple(variant for name in names for variant in VARIANTS if name == variant)
    if len(known) < len(names) or not names:
        raise UsageError(
            f"--compare {arguments.compare!r} names an unknown variant",
            fix=f"give some of {', '.join(VARIANTS)}, separated by commas",
            code="unknown-variant",
        )
    return known


def log(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    run_command(main)
