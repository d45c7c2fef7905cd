"""Fine-tune an encoder on a labeled table: read, fit every variant, report, save the best model, register it.

`clozeworks finetune` is the command, `trainer.finetune` the function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, cast

from data_prep.base.errors import UsageError, UserError, options_as_parameters
from data_prep.base.local_paths import home_in
from data_prep.storage import storage
from trainer.finetuning.examples import Columns
from trainer.finetuning.finetune_settings import FinetuneSettings, Variant, check_settings, tracking_settings
from trainer.finetuning.task_data import Files
from trainer.finetuning.tasks import TaskName
from trainer.inference.pulled_model import hugging_face_folder, is_address
from trainer.tracking.mlflow_server import server_options

if TYPE_CHECKING:  # these import torch, and wrong arguments are refused before that
    from trainer.finetuning.experiment import Best, Experiment, VariantResult
    from trainer.finetuning.experiment_runs import ExperimentRuns
    from trainer.registry.registration import Registration


@dataclass(frozen=True)
class FinetuneResult:
    """Result of a fine-tuning."""

    folder: Path
    """The model with the best valid score, as a Hugging Face directory."""
    metric: str
    """The metric that chose it."""
    results: tuple[VariantResult, ...]
    """By variant: the fits of all seeds with their scores, and the learning rates tried."""
    report: str
    """The report as text; also `report.txt` in the output directory, beside `scores.json` and `curves.png`."""
    baseline: dict[str, float]
    """Scores of the yardstick, which reads no text: the most frequent class or tag, the mean, or the whole context."""
    registration: Registration | None = None

    @property
    def scores(self) -> dict[str, tuple[float, float]]:
        """Mean and standard deviation of the metric over the seeds, by variant."""
        return {result.variant: result.mean_and_spread(self.metric) for result in self.results}


@home_in("model", "train", "valid", "test", "output")
def finetune(
    model: str | Path,
    train: str | Path,
    *,
    task: TaskName = "classification",
    valid: str | Path | None = None,
    test: str | Path | None = None,
    text_column: str = "text",
    pair_column: str | None = None,
    label_column: str = "label",
    quoting: bool = True,
    output: str | Path = "fitted",
    compare: Sequence[Variant] | str = ("full",),
    seeds: int = 3,
    learning_rates: Sequence[float] = (),
    epochs: int = 3,
    batch_size: int = 32,
    early_stopping: int | None = None,
    metric: str | None = None,
    max_length: int | None = None,
    split_seed: int = 0,
    tracking_uri: str | None = None,
    is_tracked: bool = True,
    experiment: str = "finetuning",
    register: str | None = None,
    alias: str | None = None,
    log: Callable[[str], None] | None = None,
) -> FinetuneResult:
    """Fine-tune an encoder on labeled tables (tsv, csv, jsonl or parquet) and save the best model.

    Args:
        model: a run's output directory, a checkpoint, an export, `models:/NAME@ALIAS`, or a name on the Hub.
        train: training examples; without `valid` and `test`, a tenth of them is split off for each, by `split_seed`.
        valid: examples that select the learning rate and the epoch.
        test: the data the reported scores are computed on (without it and with `valid`: the valid data).
        quoting: whether quotation marks of tsv and csv enclose cells, or are plain characters.
        output: new directory for model, report, scores and curves.
        task: one of `classification`, `pair_classification`, `regression`, `token_classification` and
            `question_answering`.
        compare: variants to fit: `full` (encoder and head), `frozen` (the head alone), `scratch` (both from random
            weights).
        seeds: fits per variant; the first one tries every learning rate, the others take the best.
        learning_rates: default: three around a usual one for the size of the encoder.
        batch_size: examples per step.
        early_stopping: epochs without a better valid score before a fit ends; default: never.
        metric: the metric that selects; default: accuracy, spearman or f1, depending on the task.
        max_length: maximum tokens per example; default: that of the model.
        register: name under which the best model is registered, with `alias` if given.
        log: called with each block of progress text; default: nothing is printed.

    Raises:
        UserError: files, columns, model or arguments do not fit the task, every fit diverges, or the output directory
            cannot be written.
    """
    settings = FinetuneSettings(
        model=str(model),
        task=task,
        files=Files(Path(train), _path(valid), _path(test), quoting),
        columns=Columns(text_column, pair_column, label_column),
        output=Path(output),
        variants=_names(compare),
        num_seeds=seeds,
        epochs=epochs,
        batch_size=batch_size,
        early_stopping=early_stopping,
        learning_rates=tuple(learning_rates),
        metric=metric,
        max_length=max_length,
        split_seed=split_seed,
        tracking_uri=tracking_uri,
        is_tracked=is_tracked,
        experiment=experiment,
        register=register,
        alias=alias,
    )
    log = log or (lambda text: None)
    with options_as_parameters():
        check_settings(settings)
        return fit_experiment(settings, prepare_experiment(settings, log), log)


def prepare_experiment(settings: FinetuneSettings, log: Callable[[str], None]) -> Experiment:
    """Read the data, open the model, encode, and log a description of both with an estimate of the time.

    Raises:
        UserError: model, files or memory do not fit the task.
    """
    from trainer.finetuning.experiment import prepare
    from trainer.finetuning.fit import FitSettings
    from trainer.finetuning.preview import describe, estimate_lines, estimate_seconds

    experiment = prepare(
        lambda: hugging_face_folder(settings.model, settings.tracking_uri),
        settings.task,
        settings.files,
        settings.columns,
        settings.variants,
        split_seed=settings.split_seed,
        max_length=settings.max_length,
        metric=settings.metric,
        learning_rates=settings.learning_rates,
        num_seeds=settings.num_seeds,
        settings=FitSettings(settings.epochs, settings.batch_size, settings.early_stopping),
    )
    log("\n".join(describe(experiment)))
    log("\n".join(estimate_lines(experiment, estimate_seconds(experiment))))
    return experiment


def fit_experiment(settings: FinetuneSettings, experiment: Experiment, log: Callable[[str], None]) -> FinetuneResult:
    """Fit every variant, report, save the best model, and register it if requested.

    Raises:
        UserError: every fit diverges, the output cannot be written, or the registry refuses the model.
    """
    from trainer.finetuning.experiment import Best
    from trainer.finetuning.experiment_runs import ExperimentRuns

    tracking = tracking_settings(settings) if settings.is_tracked else None
    _make_output(settings.output)
    with ExperimentRuns(tracking, settings.output, "give another --experiment") as runs:
        result = _fit_all(settings, experiment, runs, Best(experiment.metric), log)
    if runs.parent.view_hint:
        log(f"metrics: {runs.parent.view_hint}")
    if settings.register is None:
        return result
    registration = _register(settings, result.folder, runs.parent.run_id)
    server = _server_option(settings)
    log(f"registered {registration.name} version {registration.version} at {registration.server}")
    log(f"  clozeworks predict --model {quote(registration.model_uri)}{server} --input FILE --output FILE")
    return replace(result, registration=registration)


def _fit_all(
    settings: FinetuneSettings, experiment: Experiment, runs: ExperimentRuns, best: Best, log: Callable[[str], None]
) -> FinetuneResult:
    from trainer.finetuning.comparison import draw_comparison, log_results, progress_line, report_lines, write_scores
    from trainer.finetuning.experiment import run_variant

    output = settings.output
    runs.parent.log_params(_run_params(settings, experiment))
    results = []
    for variant in experiment.learning_rates:
        results.append(run_variant(experiment, variant, runs.child, best.keep))
        log(progress_line(experiment, results[-1]))
    report = "\n".join(report_lines(experiment, results))
    log(f"\n{report}")  # before anything is written, so that a full disk loses no result
    picture = output / "curves.png"
    try:
        title = f"{settings.task}: {settings.files.train.name}"
        picture.write_bytes(draw_comparison(results, experiment.metric, title))
        (output / "report.txt").write_text(report + "\n", encoding="utf-8")
        write_scores(output / "scores.json", experiment, results)
    except OSError as error:
        raise UserError(
            f"{output} cannot be written ({error.strerror or error})",
            fix="free the disk or give another output directory, and fit again",
            code="unwritable-file",
        ) from None
    folder = _save_best(settings, experiment, best, runs.parent.run_id)
    log_results(runs.parent, experiment, results, report, picture)
    log(f"\ncurves: {picture}\nmodel: {folder}\n{_saved_line(best, experiment)}")
    baseline = experiment.data.baseline_scores(experiment.data.scored_on)
    return FinetuneResult(folder, experiment.metric, tuple(results), report, baseline)


def _run_params(settings: FinetuneSettings, experiment: Experiment) -> dict[str, Any]:
    """Return the parameters of the parent run."""
    return {
        "model": settings.model,
        "task": settings.task,
        "text_column": settings.columns.text,
        "pair_column": settings.columns.pair,
        "label_column": settings.columns.label,
        "no_quoting": not settings.files.quoting,
        "split_seed": settings.split_seed,
        "seeds": settings.num_seeds,
        "epochs": settings.epochs,
        "batch_size": settings.batch_size,
        "early_stopping": settings.early_stopping,
        "variants": ",".join(experiment.learning_rates),
        "num_examples": experiment.data.num_examples,
        "files": {part: str(path) for part, path in settings.files.given.items()},
        "metric": experiment.metric,
        "max_length": experiment.data.preprocessor.max_length,
        "learning_rates": experiment.learning_rates,
    }


def _save_best(settings: FinetuneSettings, experiment: Experiment, best: Best, run_id: str | None) -> Path:
    """Save the best model with its origin; return its folder."""
    from trainer.finetuning.fitted_model import FitFacts, save_fitted_model

    assert best.model is not None and best.fit is not None, "there was a fit"
    one, data = best.fit, experiment.data
    facts = FitFacts(
        task=settings.task,
        base_model=settings.model if is_address(settings.model) else Path(settings.model).name,
        variant=one.variant,
        text_column=settings.columns.text,
        pair_column=settings.columns.pair,
        label_column=settings.columns.label,
        max_length=data.preprocessor.max_length,
        learning_rate=one.learning_rate,
        seed=one.seed,
        best_epoch=one.best_epoch,
        num_examples=data.num_examples,
        valid_scores=one.valid_scores,
        scores=one.scores,
        scored_on=data.scored_on,
        baseline=data.task.baseline_text(data.train_labels),
        baseline_scores=data.baseline_scores(data.scored_on),
        train_sha256=storage.sha256_of(settings.files.train),
        scored_sha256=settings.files.examples_sha256(data.scored_on, settings.split_seed),
        quoting=settings.files.quoting,
    )
    folder = settings.output / "model"
    save_fitted_model(best.model, experiment.encoder, folder, facts, run_id)
    return folder


def _saved_line(best: Best, experiment: Experiment) -> str:
    """Return the line that names the saved fit and what selected it."""
    from trainer.finetuning.comparison import valid_yardstick

    one = best.fit
    assert one is not None, "there was a fit"
    return (
        f"saved: {one.variant}, seed {one.seed}, learning rate {one.learning_rate:g}, "
        f"selected by valid {best.metric} {one.valid_scores[best.metric]:.4f} "
        f"({valid_yardstick(experiment.data, best.metric)})"
    )


def _make_output(output: Path) -> None:
    if output.is_dir() and any(output.iterdir()):
        raise UsageError(
            f"the output directory {output} is not empty",
            fix="give a new directory, or remove this one first",
            code="output-not-empty",
        )
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the output directory {output} cannot be created ({error.strerror})",
            fix="give another directory",
            code="unwritable-file",
        ) from None


def _register(settings: FinetuneSettings, folder: Path, run_id: str | None) -> Registration:
    """Register the fitted model; if that fails, the error has the command that registers it later."""
    from trainer.registry.registration import register

    assert settings.register is not None
    alias = f" --alias {quote(settings.alias)}" if settings.alias else ""
    command = f"clozeworks register --model {quote(str(folder))} --name {quote(settings.register)}{alias}"
    try:
        return register(folder, settings.register, settings.alias, settings.tracking_uri, run_id)
    except UserError as error:
        raise UserError(
            f"{error.problem.rstrip('. ')}. The fitted model is complete in {folder}",
            fix=f"{error.fix or 'correct that'}, then run `{command}{_server_option(settings)}`",
            code=error.code or "registration-failed",
        ) from error


def _server_option(settings: FinetuneSettings) -> str:
    """Return the option that names the MLflow server, for a command to print."""
    return "".join(f" {quote(word)}" for word in server_options(settings.tracking_uri))


def _names(names: Sequence[Variant] | str) -> tuple[Variant, ...]:
    """Return variants as a tuple; a string separates them by commas."""
    parts = names.split(",") if isinstance(names, str) else names
    return cast("tuple[Variant, ...]", tuple(name.strip() for name in parts))  # which the caller checks


def _path(path: str | Path | None) -> Path | None:
    return None if path is None else Path(path)
