"""Fine-tune a pretrained encoder on labeled text, and compare it with training from scratch.

    clozeworks finetune --model models:/NAME@ALIAS --task classification \\
        --train train.tsv --test dev.tsv --text-column sentence \\
        --label-column label --compare scratch,frozen,full --output fitted

Without --valid and --test the command splits off a tenth of --train for each, by seed and stratified by class (SQuAD's
.json: a tenth of the contexts, each with all its questions). The valid score selects the learning rate and the epoch.
Reported scores are computed on the test examples, or on the valid examples if there is --valid but no --test. The
command writes OUTPUT/model, which loads in transformers without this project, OUTPUT/report.txt (the printed report),
OUTPUT/scores.json and OUTPUT/curves.png. It does not need deepspeed.

--layer trains nothing in the encoder: it fits a linear probe on the stored features of every layer (all), or of one
(0 is the embeddings), and writes OUTPUT/probes.json and OUTPUT/probes.png. The task length has the number of tokens of
--text-column as its label; for subject_number --train is BLiMP's folder, or files of it, without columns.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.base.arguments import Joined, local_output
from data_prep.base.errors import run_command
from launch.options import add_dry_run, add_model, add_no_quoting, add_tracking_uri, check_new_folder, command_parser

if TYPE_CHECKING:
    from trainer.finetuning.finetune_settings import FinetuneSettings

TASKS = (
    *("classification", "multilabel_classification", "pair_classification", "regression", "token_classification"),
    *("question_answering", "embedding"),
)
PROBE_TASKS = ("length", "subject_number")
VARIANTS = ("scratch", "frozen", "full")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("finetune.py", __doc__)
    parser.usage = "%(prog)s --model MODEL --task TASK --train FILE [OPTIONS]"
    task = parser.add_argument_group("model and task")
    add_model(task)
    task.add_argument(
        "--task",
        required=True,
        choices=(*TASKS, *PROBE_TASKS),
        metavar="TASK",
        help=f"{', '.join(TASKS)}; with --layer also {', '.join(PROBE_TASKS)}",
    )
    data = parser.add_argument_group("labeled data: tsv, csv, jsonl, parquet, json of SQuAD, or conll")
    data.add_argument("--train", required=True, type=Path, metavar="FILE", help="training examples")
    data.add_argument("--valid", type=Path, metavar="FILE", help="examples that select learning rate and epoch")
    data.add_argument("--test", type=Path, metavar="FILE", help="examples on which the reported scores are computed")
    data.add_argument(
        "--text-column",
        metavar="NAME",
        help="column of the text; of the words (a list, or separated by spaces); of the context; of the anchor "
        "(default for embedding: anchor)",
    )
    data.add_argument(
        "--pair-column",
        metavar="NAME",
        help="column of the second text of a pair; of the question; of the negative of a triplet (default: none)",
    )
    data.add_argument(
        "--label-column",
        metavar="NAME",
        help="column of the class; classes; number; tags; answer; positive (default for embedding: positive)",
    )
    add_no_quoting(data)
    data.add_argument(
        "--on-bad-row",
        choices=("refuse", "skip"),
        default="refuse",
        help="refuse a file with empty or invalid cells, or skip and count these rows (default refuse)",
    )
    data.add_argument("--max-length", type=int, metavar="N", help="maximum sequence length (default: the model's)")
    how = parser.add_argument_group("training")
    variant = how.add_mutually_exclusive_group()
    variant.add_argument("--freeze-encoder", action="store_true", help="train only the head, on stored features")
    variant.add_argument("--from-scratch", action="store_true", help="train encoder and head from random weights")
    variant.add_argument(
        "--layer",
        metavar="N",
        help="fit linear probes instead: on the features of layer N, or of every layer (all)",
    )
    variant.add_argument(
        "--compare", action=Joined, metavar="A,B,...", help=f"compare several of {', '.join(VARIANTS)}"
    )
    how.add_argument(
        "--seeds", type=int, default=3, metavar="N", help="number of runs, with seeds 0 to N-1 (default 3)"
    )
    how.add_argument(
        "--learning-rates",
        type=float,
        nargs="+",
        action="extend",
        metavar="RATE",
        help="learning rates that the first seed tries (default: depends on the variant)",
    )
    how.add_argument("--epochs", type=int, default=3, metavar="N", help="number of epochs (default 3)")
    how.add_argument("--batch-size", type=int, default=32, metavar="N", help="examples per step (default 32)")
    how.add_argument(
        "--early-stopping",
        type=int,
        metavar="N",
        help="stop after N epochs without a better valid score (default: never)",
    )
    how.add_argument(
        "--metric",
        metavar="NAME",
        help="metric that selects (default: accuracy, spearman, f1 or ndcg_at_10, depending on the task)",
    )
    how.add_argument(
        "--pooling",
        choices=("mean", "cls"),
        default="mean",
        help="embedding: pooling over a text's tokens (default mean)",
    )
    how.add_argument(
        "--matryoshka",
        type=_sizes,
        default=(),
        metavar="N,N,...",
        help="embedding: sizes to which the vectors may be cut later; the whole vectors are fitted too",
    )
    how.add_argument("--split-seed", type=int, default=0, metavar="N", help="seed of the split of --train (default 0)")
    out = parser.add_argument_group("output")
    out.add_argument(
        "--output",
        type=local_output("--output"),
        default=Path("fitted"),
        metavar="DIR",
        help="a new folder (default ./fitted)",
    )
    out.add_argument("--register", metavar="NAME", help="register the best model under this name")
    out.add_argument("--alias", metavar="ALIAS", help="with --register: alias to set on the new version")
    add_tracking_uri(out)
    out.add_argument(
        "--experiment", default="finetuning", metavar="NAME", help="MLflow experiment (default finetuning)"
    )
    out.add_argument("--no-tracking", action="store_true", help="log nothing to MLflow")
    add_dry_run(out, "read the data, check and estimate, but train and write nothing")
    given = parser.parse_args(arguments)
    columns = {"--text-column": given.text_column, "--label-column": given.label_column}
    needed = {"embedding": [], "length": ["--text-column"], "subject_number": []}.get(given.task, [*columns])
    if missing := [option for option in needed if columns[option] is None]:
        parser.error(f"the following arguments are required for --task {given.task}: {', '.join(missing)}")
    unused = {**columns, "--pair-column": given.pair_column} if given.task in PROBE_TASKS else {}
    if extra := [option for option, name in unused.items() if option not in needed and name is not None]:
        parser.error(f"--task {given.task} does not read {', '.join(extra)}")
    return given


def _sizes(text: str) -> tuple[int, ...]:
    """Return the sizes of --matryoshka."""
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not whole numbers separated by commas") from None


def main() -> None:
    arguments = parse_arguments()
    from trainer.finetuning.finetune import fit_experiment, prepare_experiment
    from trainer.finetuning.finetune_settings import check_settings

    settings = settings_of(arguments)
    check_settings(settings)
    check_new_folder(arguments.output)
    if settings.layer is not None:
        probe_layers(settings, arguments.dry_run)
        return
    experiment = prepare_experiment(settings, log)
    if arguments.dry_run:
        log("dry run: nothing was fitted and nothing was written")
        return
    fit_experiment(experiment, log)


def probe_layers(settings: FinetuneSettings, is_dry_run: bool) -> None:
    from trainer.finetuning.layer_probes import prepare_probes, run_probes

    plan = prepare_probes(settings, log)
    if is_dry_run:
        log("dry run: no probe was fitted and nothing was written")
        return
    run_probes(plan, log)


def settings_of(arguments: argparse.Namespace) -> FinetuneSettings:
    """Return the settings that the command line gives."""
    from trainer.finetuning.finetune_settings import FinetuneSettings

    one = "frozen" if arguments.freeze_encoder else "scratch" if arguments.from_scratch else "full"
    names = {each.name for each in fields(FinetuneSettings)}
    given = {name: value for name, value in vars(arguments).items() if name in names and value is not None}
    own = {"quoting": not arguments.no_quoting, "is_tracked": not arguments.no_tracking}
    return FinetuneSettings(**{"compare": one} | given | own)


def log(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    run_command(main)
