"""Fit a pretrained encoder to labelled text, and see what the pretraining was worth.

    finetune.py --model models:/NAME@ALIAS --task classification --train train.tsv --test dev.tsv \\
        --text-column sentence --label-column label --compare scratch,frozen,full --output fitted

A file that is not given is cut from --train, by seed, every class in proportion: without --valid and --test both, a
tenth each. The learning rate and the epoch are chosen by the valid score, scores are told of the test examples (of
the valid ones where there is --valid and no --test). OUTPUT/model loads in transformers without this project;
OUTPUT/report.txt is what is printed at the end, OUTPUT/curves.png the curves. No deepspeed is needed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.errors import UsageError, run_command

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from trainer.finetune.experiment import Fit, Setting, VariantResult
    from trainer.finetune.runs import ExperimentRuns

TASKS = ("classification", "pair_classification", "regression", "token_classification", "question_answering")
VARIANTS = ("scratch", "frozen", "full")
FROZEN_RATES = (1e-3, 3e-3, 1e-2)
NUM_FAILURES = 5


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="finetune.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, metavar="MODEL", help="models:/NAME@ALIAS, runs:/..., or a folder")
    parser.add_argument("--task", required=True, choices=TASKS)
    data = parser.add_argument_group("labelled data: tsv, csv, jsonl or parquet")
    data.add_argument("--train", required=True, type=Path, metavar="FILE")
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
    variant.add_argument("--compare", metavar="A,B,...", help=f"several of {', '.join(VARIANTS)} side by side")
    how.add_argument("--seeds", type=int, default=3, metavar="N", help="fits with seeds 0 to N-1 (default 3)")
    how.add_argument("--learning-rates", type=float, nargs="+", metavar="RATE", help="tried by the first seed, each")
    how.add_argument("--epochs", type=int, default=3, metavar="N", help="default 3")
    how.add_argument("--batch-size", type=int, default=32, metavar="N", help="examples a step (default 32)")
    how.add_argument("--early-stopping", type=int, metavar="N", help="end after N epochs without a better valid score")
    how.add_argument("--metric", metavar="NAME", help="what chooses (default: accuracy, spearman or f1, by the task)")
    how.add_argument("--split-seed", type=int, default=0, metavar="N", help="which examples are cut (default 0)")
    out = parser.add_argument_group("where it goes")
    out.add_argument(
        "--output", type=Path, default=Path("fitted"), metavar="DIR", help="a new folder (default ./fitted)"
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
    from trainer.finetune.comparison import draw_comparison
    from trainer.finetune.estimate import estimate_seconds
    from trainer.finetune.experiment import run_variant
    from trainer.registry import pull

    setting = prepare(arguments, pull(arguments.model, tracking_uri=arguments.tracking_uri), variants)
    say("\n".join(describe(setting, variants)))
    estimates = estimate_seconds(setting, variants)
    say("\n".join(estimate_lines(setting, estimates)))
    if arguments.dry_run:
        say("dry run: nothing was fitted and nothing was written")
        return
    arguments.output.mkdir(parents=True, exist_ok=True)
    runs = open_runs(arguments)
    best = Best(setting.metric)
    try:
        runs.parent.log_params(run_params(arguments, setting))
        results = []
        for variant in variants:
            results.append(run_variant(setting, variant, runs.child, best.keep))
            say(progress_line(results[-1], setting.metric))
        picture = arguments.output / "curves.png"
        picture.write_bytes(draw_comparison(results, setting.metric, f"{arguments.task}: {arguments.train.name}"))
        report = "\n".join(report_lines(setting, results))
        (arguments.output / "report.txt").write_text(report + "\n", encoding="utf-8")
        folder = save_best(best, setting, arguments, runs.parent.run_id)
        log_results(runs, results, report, setting, picture)
    except BaseException as error:
        runs.close("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
        raise
    runs.close("FINISHED")
    say(f"\n{report}\n\ncurves: {picture}\nmodel: {folder}")
    if arguments.register:
        register_fitted(folder, arguments, runs.parent.run_id)


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
        UsageError: naming the option.
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
    if arguments.output.exists() and (not arguments.output.is_dir() or any(arguments.output.iterdir())):
        raise UsageError(f"--output {arguments.output} is not empty; give a new folder, or remove this one first")
    if arguments.register:
        from trainer.registry import check_names

        check_names(arguments.register, arguments.alias)


def prepare(arguments: argparse.Namespace, folder: Path, variants: tuple[str, ...]) -> Setting:
    """Read and encode the data, and settle everything that the fits share."""
    from trainer.finetune.batches import Collator
    from trainer.finetune.data import Files, encode_task, read_task
    from trainer.finetune.examples import Columns
    from trainer.finetune.experiment import Setting
    from trainer.finetune.tasks import Preprocessor
    from trainer.pretrained import load_config, load_tokenizer, max_length

    files = Files(arguments.train, arguments.valid, arguments.test, not arguments.no_quoting)
    columns = Columns(arguments.text_column, arguments.pair_column, arguments.label_column)
    task, examples = read_task(arguments.task, files, columns, arguments.split_seed)
    metric = arguments.metric or task.metrics[0]
    choosing = [name for name in task.metrics if name != "rmse"]  # which is better where it is less
    if metric not in choosing:
        raise UsageError(f"--metric {metric!r} cannot choose fits of {task.name}; take one of {', '.join(choosing)}")
    config, tokenizer = load_config(folder), load_tokenizer(folder)
    longest = max_length(config, tokenizer)
    preprocessor = Preprocessor(
        tokenizer, min(arguments.max_length or longest, longest), getattr(config, "type_vocab_size", 0) > 1
    )
    rates = {variant: learning_rates(arguments, variant, config.hidden_size) for variant in variants}
    return Setting(
        folder,
        encode_task(task, examples, preprocessor),
        preprocessor,
        Collator(tokenizer.pad_token_id or 0),
        metric,
        rates,
        tuple(range(arguments.seeds)),
        arguments.epochs,
        arguments.batch_size,
        arguments.early_stopping,
    )


def learning_rates(arguments: argparse.Namespace, variant: str, hidden_size: int) -> tuple[float, ...]:
    """The rates to try: those asked for, else around 5e-5 for 768 hidden (Devlin et al. 2018), more for narrow ones."""
    if arguments.learning_rates:
        return tuple(dict.fromkeys(arguments.learning_rates))
    if variant == "frozen":
        return FROZEN_RATES
    usual = min(5e-5 * 768 / hidden_size, 5e-4)
    return tuple(float(f"{usual * factor:.1e}") for factor in ((1, 2, 4) if variant == "scratch" else (0.5, 1, 2)))


def describe(setting: Setting, variants: tuple[str, ...]) -> Iterator[str]:
    """What is about to be done: the data, how its text fits the tokenizer, what is trained."""
    from trainer.finetune.data import data_lines
    from trainer.finetune.experiment import make_model
    from trainer.finetune.parameters import parameter_lines, trainable_parameters
    from trainer.finetune.text_fit import fit_lines, measure_text, pretraining_fit

    data = setting.data
    yield from data_lines(data, setting.preprocessor.max_length)
    texts = [text if isinstance(text, str) else " ".join(text) for text in data.train.examples.texts]
    yield ""
    yield from fit_lines(measure_text(texts, setting.preprocessor.tokenizer), pretraining_fit(setting.model_folder))
    model = make_model(setting, "full", 0)
    for variant in variants:
        yield f"\n{variant}"
        yield from parameter_lines(trainable_parameters(model, frozen=variant == "frozen"))


def estimate_lines(setting: Setting, estimates: dict[str, float]) -> Iterator[str]:
    from trainer.console import duration

    seeds, epochs = len(setting.seeds), setting.epochs
    yield ""
    for variant, seconds in estimates.items():
        rates = setting.learning_rates[variant]
        shown = ", ".join(f"{rate:g}" for rate in rates)
        what = f"{len(rates) + seeds - 1} fits of {epochs} epochs (rates {shown}; {seeds} seeds)"
        yield f"{variant}: {what}, about {duration(seconds)}"
    yield f"about {duration(sum(estimates.values()))} in all, by a few timed steps"


@dataclass
class Best:
    """The fitted model with the best valid score so far; only that one is held."""

    metric: str
    model: PreTrainedModel | None = None
    fit: Fit | None = None

    def keep(self, model: PreTrainedModel, one: Fit) -> None:
        if self.fit is None or one.valid_scores[self.metric] > self.fit.valid_scores[self.metric]:
            self.model, self.fit = model, one


def progress_line(result: VariantResult, metric: str) -> str:
    from trainer.console import duration

    mean, spread = result.mean_and_spread(metric)
    seconds = sum(one.seconds for one in result.fits)
    return (
        f"{result.variant}: {metric} {mean:.4f} ± {spread:.4f}; {len(result.fits)} chosen fits in {duration(seconds)}"
    )


def report_lines(setting: Setting, results: list[VariantResult]) -> Iterator[str]:
    from trainer.finetune.comparison import failure_lines, length_lines, rate_lines, score_lines

    data = setting.data
    yield from score_lines(results, data.task.metrics, data.test is not None)
    yield from rate_lines(results, setting.metric)
    best = [result.best(setting.metric) for result in results]
    yield ""
    yield from length_lines(best, data)
    for one in best:
        yield ""
        yield from failure_lines(one, data, NUM_FAILURES)


def open_runs(arguments: argparse.Namespace) -> ExperimentRuns:
    from trainer.finetune.runs import ExperimentRuns
    from trainer.mlflow_server import resolve_tracking_uri
    from trainer.settings.watching import TrackingSettings

    if arguments.no_tracking:
        return ExperimentRuns.silent()
    uri = resolve_tracking_uri(arguments.tracking_uri)
    settings = TrackingSettings(
        uri=uri, experiment=arguments.experiment, run_name=f"{arguments.task}-{arguments.train.stem}"
    )
    return ExperimentRuns.open(settings, arguments.output, uri)


def run_params(arguments: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    """What the parent run says of the experiment."""
    names = ("model", "task", "text_column", "pair_column", "label_column", "epochs", "batch_size", "seeds", "compare")
    sizes = {name: len(part.examples) for name, part in setting.data.parts.items()}
    files = {name: str(getattr(arguments, name)) for name in ("train", "valid", "test") if getattr(arguments, name)}
    return {
        **{name: getattr(arguments, name) for name in names},
        "num_examples": sizes,
        "files": files,
        "metric": setting.metric,
    }


def log_results(
    runs: ExperimentRuns, results: list[VariantResult], report: str, setting: Setting, picture: Path
) -> None:
    """Means and spreads to the parent run, with report and picture."""
    scores = {}
    for result in results:
        for metric in setting.data.task.metrics:
            mean, spread = result.mean_and_spread(metric)
            scores |= {f"{result.variant}/{metric}_mean": mean, f"{result.variant}/{metric}_spread": spread}
    runs.parent.log(0, scores)
    runs.parent.log_artifact_text("report.txt", report + "\n")
    runs.log_picture(picture, warn)


def save_best(best: Best, setting: Setting, arguments: argparse.Namespace, run_id: str | None) -> Path:
    from data_prep import storage
    from trainer.finetune.fitted_model import FitFacts, save_fitted_model

    assert best.model is not None and best.fit is not None, "there was a fit"
    one, data = best.fit, setting.data
    named_by_path = not arguments.model.startswith(("models:/", "runs:/"))
    facts = FitFacts(
        task=arguments.task,
        base_model=Path(arguments.model).name if named_by_path else arguments.model,
        variant=one.variant,
        text_column=arguments.text_column,
        pair_column=arguments.pair_column,
        label_column=arguments.label_column,
        max_length=setting.preprocessor.max_length,
        learning_rate=one.learning_rate,
        seed=one.seed,
        best_epoch=one.best_epoch,
        num_examples={name: len(part.examples) for name, part in data.parts.items()},
        valid_scores=one.valid_scores,
        scores=one.scores,
        scored_on="test" if data.test is not None else "valid",
        train_sha256=storage.sha256_of(arguments.train),
    )
    folder = arguments.output / "model"
    save_fitted_model(best.model, setting.model_folder, folder, facts, run_id)
    return folder


def register_fitted(folder: Path, arguments: argparse.Namespace, run_id: str | None) -> None:
    from trainer.registry import register

    registration = register(folder, arguments.register, arguments.alias, arguments.tracking_uri, run_id)
    say(f"registered {registration.name} version {registration.version} at {registration.tracking_uri}")
    say(f"  python launch/predict.py --model {registration.model_uri} --input FILE --output FILE")


def warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    run_command(main)
