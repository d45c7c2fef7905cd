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
from shlex import quote
from typing import TYPE_CHECKING, Any

from data_prep.base.arguments import Joined, local_output
from data_prep.base.errors import UsageError, UserError, run_command
from data_prep.base.settings import validate_settings
from launch.options import add_model, add_no_quoting, add_tracking_uri, check_new_folder, command_parser

if TYPE_CHECKING:
    from trainer.config.run_settings import TrackingSettings
    from trainer.finetuning.experiment import Best, Experiment
    from trainer.finetuning.experiment_runs import ExperimentRuns
    from trainer.finetuning.task_data import Files

TASKS = ("classification", "pair_classification", "regression", "token_classification", "question_answering")
VARIANTS = ("scratch", "frozen", "full")


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
    variants = chosen_variants(arguments)
    check_arguments(arguments)
    tracking = None if arguments.no_tracking else tracking_settings(arguments)
    from trainer.finetuning.examples import Columns
    from trainer.finetuning.experiment import Best, prepare
    from trainer.finetuning.experiment_runs import ExperimentRuns
    from trainer.finetuning.fit import FitSettings
    from trainer.finetuning.preview import describe, estimate_lines, estimate_seconds
    from trainer.registry.pulled_model import pull

    experiment = prepare(
        pull(arguments.model, tracking_uri=arguments.tracking_uri),
        arguments.task,
        files_of(arguments),
        Columns(arguments.text_column, arguments.pair_column, arguments.label_column),
        variants,
        split_seed=arguments.split_seed,
        max_length=arguments.max_length,
        metric=arguments.metric,
        learning_rates=arguments.learning_rates or (),
        num_seeds=arguments.seeds,
        settings=FitSettings(arguments.epochs, arguments.batch_size, arguments.early_stopping),
    )
    say("\n".join(describe(experiment)))
    say("\n".join(estimate_lines(experiment, estimate_seconds(experiment))))
    if arguments.dry_run:
        say("dry run: nothing was fitted and nothing was written")
        return
    make_output(arguments.output)
    runs, best = ExperimentRuns(tracking, arguments.output), Best(experiment.metric)
    try:
        folder = fit_all(arguments, experiment, runs, best)
    except BaseException as error:
        runs.close("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
        raise
    runs.close("FINISHED")
    if arguments.register:
        register_fitted(folder, arguments, runs.parent.run_id)


def fit_all(arguments: argparse.Namespace, experiment: Experiment, runs: ExperimentRuns, best: Best) -> Path:
    """Fit every variant, report, and save the best model; returns its folder."""
    from trainer.finetuning.comparison import draw_comparison, log_results, progress_line, report_lines, write_scores
    from trainer.finetuning.experiment import run_variant

    output: Path = arguments.output
    runs.parent.log_params(run_params(arguments, experiment))
    results = []
    for variant in experiment.learning_rates:
        results.append(run_variant(experiment, variant, runs.child, best.keep))
        say(progress_line(results[-1], experiment.metric))
    report = "\n".join(report_lines(experiment, results))
    say(f"\n{report}")  # before anything is written, so that a full disk takes no figure away
    picture = output / "curves.png"
    try:
        picture.write_bytes(draw_comparison(results, experiment.metric, f"{arguments.task}: {arguments.train.name}"))
        (output / "report.txt").write_text(report + "\n", encoding="utf-8")
        write_scores(output / "scores.json", experiment, results)
    except OSError as error:
        raise UserError(f"{output} cannot be written ({error.strerror or error}); see to it and fit again") from None
    folder = save_best(best, arguments, experiment, runs.parent.run_id)
    log_results(runs.parent, experiment, results, report, picture)
    say(f"\ncurves: {picture}\nmodel: {folder}")
    return folder


def files_of(arguments: argparse.Namespace) -> Files:
    """The files of labeled data."""
    from trainer.finetuning.task_data import Files

    return Files(arguments.train, arguments.valid, arguments.test, not arguments.no_quoting)


def tracking_settings(arguments: argparse.Namespace) -> TrackingSettings:
    """Where the runs go.

    Raises:
        UsageError: MLflow takes no experiment of that name.
    """
    from trainer.config.run_settings import TrackingSettings
    from trainer.tracking.mlflow_server import resolve_tracking_uri

    uri = resolve_tracking_uri(arguments.tracking_uri)
    named = {"uri": uri, "experiment": arguments.experiment, "run_name": f"{arguments.task}-{arguments.train.stem}"}
    return validate_settings(TrackingSettings, named, "the command line")


def run_params(arguments: argparse.Namespace, experiment: Experiment) -> dict[str, Any]:
    """The parameters of the parent run."""
    names = (
        *("model", "task", "text_column", "pair_column", "label_column", "no_quoting"),
        *("split_seed", "seeds", "epochs", "batch_size", "early_stopping"),
    )
    return {
        **{name: getattr(arguments, name) for name in names},
        "variants": ",".join(experiment.learning_rates),
        "num_examples": experiment.data.num_examples,
        "files": {part: str(path) for part, path in files_of(arguments).given.items()},
        "metric": experiment.metric,
        "max_length": experiment.data.preprocessor.max_length,
        "learning_rates": experiment.learning_rates,
    }


def save_best(best: Best, arguments: argparse.Namespace, experiment: Experiment, run_id: str | None) -> Path:
    """Save the best model with what made it; returns its folder."""
    from data_prep.storage import storage
    from trainer.finetuning.fitted_model import FitFacts, save_fitted_model
    from trainer.registry.pulled_model import is_address

    assert best.model is not None and best.fit is not None, "there was a fit"
    one, data = best.fit, experiment.data
    facts = FitFacts(
        task=arguments.task,
        base_model=arguments.model if is_address(arguments.model) else Path(arguments.model).name,
        variant=one.variant,
        text_column=arguments.text_column,
        pair_column=arguments.pair_column,
        label_column=arguments.label_column,
        max_length=data.preprocessor.max_length,
        learning_rate=one.learning_rate,
        seed=one.seed,
        best_epoch=one.best_epoch,
        num_examples=data.num_examples,
        valid_scores=one.valid_scores,
        scores=one.scores,
        scored_on=data.scored_on,
        train_sha256=storage.sha256_of(arguments.train),
    )
    folder: Path = arguments.output / "model"
    save_fitted_model(best.model, experiment.encoder, folder, facts, run_id)
    return folder


def chosen_variants(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The ways to fit that were asked for.

    Raises:
        UsageError: one is not known.
    """
    if arguments.compare is None:
        return ("frozen",) if arguments.freeze_encoder else ("scratch",) if arguments.from_scratch else ("full",)
    names = tuple(dict.fromkeys(name.strip() for name in arguments.compare.split(",") if name.strip()))
    unknown = [name for name in names if name not in VARIANTS]
    if unknown or not names:
        raise UsageError(f"--compare {arguments.compare!r} must name some of {', '.join(VARIANTS)}, parted by commas")
    return names


def check_arguments(arguments: argparse.Namespace) -> None:
    """Refuse what cannot go well before anything is read.

    Raises:
        UserError: naming the option, or a file that is not there.
    """
    for option in ("seeds", "epochs", "batch_size", "early_stopping", "max_length"):
        value = getattr(arguments, option)
        if value is not None and value < 1:
            raise UsageError(f"--{option.replace('_', '-')} {value} is too small; it counts from 1")
    if arguments.max_length is not None and arguments.max_length < 8:
        raise UsageError(f"--max-length {arguments.max_length} leaves no room for text; give at least 8")
    for rate in arguments.learning_rates or []:
        if not 0.0 < rate < 1.0:
            raise UsageError(f"--learning-rates {rate:g} is no learning rate; give numbers such as 5e-5")
    if arguments.alias and not arguments.register:
        raise UsageError("--alias points to a registered model; give --register NAME too")
    from trainer.finetuning.labeled_tables import check_readable
    from trainer.finetuning.task_data import task_of_columns
    from trainer.finetuning.tasks import choosing_metric

    choosing_metric(task_of_columns(arguments.task, arguments.pair_column), arguments.metric)
    for path in (arguments.train, arguments.valid, arguments.test):
        if path is not None:
            check_readable(path)
    check_new_folder(arguments.output, "--output")
    if arguments.register:
        from trainer.config.registry_names import check_names

        check_names(arguments.register, arguments.alias)


def make_output(output: Path) -> None:
    """Make the new folder.

    Raises:
        UserError: it cannot be made.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {output} cannot be made ({error.strerror}); give another folder") from None


def register_fitted(folder: Path, arguments: argparse.Namespace, run_id: str | None) -> None:
    """Register the fitted model; where that fails, the fit is not lost, and the error says how to go on.

    Raises:
        UserError: the registry refuses or does not answer.
    """
    from data_prep.storage import storage
    from trainer.registry.registration import register

    server = f" --tracking-uri {quote(storage.hide_secrets(arguments.tracking_uri))}" if arguments.tracking_uri else ""
    alias = f" --alias {quote(arguments.alias)}" if arguments.alias else ""
    try:
        registration = register(folder, arguments.register, arguments.alias, arguments.tracking_uri, run_id)
    except UserError as error:
        raise UserError(
            f"{error}. The fitted model is whole in {folder}; once that is fixed: python launch/register.py --model "
            f"{quote(str(folder))} --name {quote(arguments.register)}{alias}{server}"
        ) from error
    say(f"registered {registration.name} version {registration.version} at {registration.tracking_uri}")
    say(f"  python launch/predict.py --model {quote(registration.model_uri)}{server} --input FILE --output FILE")


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    run_command(main)
