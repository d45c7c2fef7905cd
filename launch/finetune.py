"""Fit a pretrained encoder to labeled text, and see what the pretraining was worth.

    finetune.py --model models:/NAME@ALIAS --task classification --train train.tsv --test dev.tsv \\
        --text-column sentence --label-column label --compare scratch,frozen,full --output fitted

A file that is not given is cut from --train, by seed, every class in proportion: without --valid and --test both, a
tenth each. The learning rate and the epoch are chosen by the valid score, scores are told of the test examples (of
the valid ones where there is --valid and no --test). OUTPUT/model loads in transformers without this project;
OUTPUT/report.txt is what is printed at the end, OUTPUT/scores.json its figures, OUTPUT/curves.png the curves. No
deepspeed is needed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from data_prep.base.arguments import Joined, local_output
from data_prep.base.errors import UsageError, UserError, run_command

if TYPE_CHECKING:
    from trainer.finetune.experiment import Setting
    from trainer.finetune.experiment_runs import ExperimentRuns
    from trainer.finetune.fit_plan import FitRequest
    from trainer.finetune.outcome import Best

TASKS = ("classification", "pair_classification", "regression", "token_classification", "question_answering")
VARIANTS = ("scratch", "frozen", "full")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="finetune.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, metavar="MODEL", help="models:/NAME@ALIAS, runs:/..., or a folder")
    parser.add_argument("--task", required=True, choices=TASKS, metavar="TASK", help=", ".join(TASKS))
    data = parser.add_argument_group("labeled data: tsv, csv, jsonl or parquet")
    data.add_argument("--train", required=True, type=Path, metavar="FILE", help="examples to fit to")
    data.add_argument("--valid", type=Path, metavar="FILE", help="chooses learning rate and epoch")
    data.add_argument("--test", type=Path, metavar="FILE", help="what scores are told of")
    data.add_argument(
        "--text-column", required=True, metavar="NAME", help="text; words (list, or parted by spaces); context"
    )
    data.add_argument("--pair-column", metavar="NAME", help="second text of a pair; question")
    data.add_argument("--label-column", required=True, metavar="NAME", help="class; number; tags; answer (as in SQuAD)")
    data.add_argument("--no-quoting", action="store_true", help="quotation marks of tsv and csv are plain characters")
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
    out.add_argument(
        "--tracking-uri", metavar="URI", help="MLflow server (default MLFLOW_TRACKING_URI, else sqlite in ./mlflow.db)"
    )
    out.add_argument("--experiment", default="finetuning", metavar="NAME", help="of MLflow (default finetuning)")
    out.add_argument("--no-tracking", action="store_true", help="log nothing to MLflow")
    out.add_argument("--dry-run", action="store_true", help="read, check and estimate, but fit and write nothing")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse_arguments()
    variants = chosen_variants(arguments)
    check_arguments(arguments)
    request = request_of(arguments, variants)
    from trainer.finetune.experiment_runs import ExperimentRuns
    from trainer.finetune.fit_plan import describe, estimate_lines, prepare
    from trainer.finetune.outcome import Best, tracking_settings
    from trainer.finetune.time_estimate import estimate_seconds
    from trainer.registry.pulled_model import pull

    tracking = tracking_settings(request)
    setting = prepare(request, pull(request.model, tracking_uri=request.tracking_uri))
    say("\n".join(describe(setting, variants)))
    say("\n".join(estimate_lines(setting, estimate_seconds(setting, variants))))
    if arguments.dry_run:
        say("dry run: nothing was fitted and nothing was written")
        return
    make_output(request.output)
    runs, best = ExperimentRuns.open(tracking, request.output), Best(setting.metric)
    try:
        folder = fit_all(request, setting, runs, best)
    except BaseException as error:
        runs.close("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
        raise
    runs.close("FINISHED")
    if arguments.register:
        register_fitted(folder, arguments, runs.parent.run_id)


def fit_all(request: FitRequest, setting: Setting, runs: ExperimentRuns, best: Best) -> Path:
    """Fit every variant, report, and save the best model; returns its folder."""
    from trainer.finetune.comparison import draw_comparison
    from trainer.finetune.experiment import run_variant
    from trainer.finetune.fit_plan import run_params
    from trainer.finetune.outcome import log_results, progress_line, report_lines, save_best, write_scores

    runs.parent.log_params(run_params(request, setting))
    results = []
    for variant in request.variants:
        results.append(run_variant(setting, variant, runs.child, best.keep))
        say(progress_line(results[-1], setting.metric))
    report = "\n".join(report_lines(setting, results))
    say(f"\n{report}")  # before anything is written, so that a full disk takes no figure away
    picture = request.output / "curves.png"
    try:
        picture.write_bytes(draw_comparison(results, setting.metric, f"{request.task}: {request.train.name}"))
        (request.output / "report.txt").write_text(report + "\n", encoding="utf-8")
        write_scores(request.output / "scores.json", setting, results)
    except OSError as error:
        raise UserError(
            f"{request.output} cannot be written ({error.strerror or error}); see to it and fit again"
        ) from None
    folder = save_best(best, setting, request, runs.parent.run_id)
    log_results(runs, results, report, setting, picture)
    say(f"\ncurves: {picture}\nmodel: {folder}")
    return folder


def request_of(arguments: argparse.Namespace, variants: tuple[str, ...]) -> FitRequest:
    """The command line as the trainer takes it."""
    from dataclasses import fields

    from trainer.finetune.fit_plan import FitRequest

    values = {field.name: getattr(arguments, field.name) for field in fields(FitRequest) if field.name != "variants"}
    values["learning_rates"] = tuple(arguments.learning_rates or ())
    return FitRequest(variants=variants, **values)


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
    from trainer.finetune.labeled_tables import check_readable
    from trainer.finetune.task_data import task_of_columns
    from trainer.finetune.tasks import choosing_metric

    choosing_metric(task_of_columns(arguments.task, arguments.pair_column), arguments.metric)
    for path in (arguments.train, arguments.valid, arguments.test):
        if path is not None:
            check_readable(path)
    check_new_folder(arguments.output, "--output")
    if arguments.register:
        from trainer.config.registry_names import check_names

        check_names(arguments.register, arguments.alias)


def check_new_folder(path: Path, option: str) -> None:
    """Refuse a folder to make that is there with something in it, or that cannot be made.

    Raises:
        UsageError: naming the option.
    """
    from trainer.finetune.labeled_tables import check_takes_files

    if path.exists() and not path.is_dir():
        raise UsageError(f"{option} {path} is a file; give a new folder")
    if path.exists() and any(path.iterdir()):
        raise UsageError(f"{option} {path} is not empty; give a new folder, or remove this one first")
    there = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not there.is_dir():
        raise UsageError(f"{option} {path} cannot be made: {there} is a file; give another folder")
    check_takes_files(there, option, path)


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
            f"{error}. The fitted model is whole in {folder}; once that is mended: python launch/register.py --model "
            f"{quote(str(folder))} --name {quote(arguments.register)}{alias}{server}"
        ) from error
    say(f"registered {registration.name} version {registration.version} at {registration.tracking_uri}")
    say(f"  python launch/predict.py --model {quote(registration.model_uri)}{server} --input FILE --output FILE")


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    run_command(main)
