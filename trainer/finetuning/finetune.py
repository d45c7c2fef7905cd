"""Fine-tune an encoder on a labeled table: read, fit every variant, report, save the best model, register it.

`clozeworks finetune` is the command, `trainer.finetune` the function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Literal

from data_prep.base.errors import UsageError, UserError, options_as_parameters
from data_prep.base.local_paths import home_in
from data_prep.storage import storage
from trainer.finetuning.finetune_settings import FinetuneSettings, Pooling, Variant, check_settings, tracking_settings
from trainer.finetuning.tasks import TaskName
from trainer.inference.pulled_model import is_address
from trainer.tracking.mlflow_server import server_options

if TYPE_CHECKING:  # these import torch, and wrong arguments are refused before that
    from trainer.finetuning.experiment import Experiment, Fit, VariantResult
    from trainer.finetuning.fitted_card import FitFacts
    from trainer.registry.registration import Registration


@dataclass(frozen=True)
class FinetuneResult:
    """Result of a fine-tuning."""

    folder: Path
    """Hugging Face directory of the model with the best valid score."""
    metric: str
    """Name of the metric that selected the model."""
    results: tuple[VariantResult, ...]
    """For each variant, the fits of all seeds with their scores, and the learning rates tried."""
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
    text_column: str | None = None,
    pair_column: str | None = None,
    label_column: str | None = None,
    quoting: bool = True,
    on_bad_row: Literal["refuse", "skip"] = "refuse",
    output: str | Path = "fitted",
    compare: Sequence[Variant] | str = ("full",),
    seeds: int = 3,
    learning_rates: Sequence[float] = (),
    epochs: int = 3,
    batch_size: int = 32,
    early_stopping: int | None = None,
    metric: str | None = None,
    max_length: int | None = None,
    pooling: Pooling = "mean",
    matryoshka: Sequence[int] = (),
    split_seed: int = 0,
    tracking_uri: str | None = None,
    is_tracked: bool = True,
    experiment: str = "finetuning",
    register: str | None = None,
    alias: str | None = None,
    log: Callable[[str], None] | None = None,
) -> FinetuneResult:
    """Fine-tune an encoder on labeled tables (tsv, csv, jsonl, parquet, SQuAD's json, conll) and save the best model.

    Args:
        model: a run's output directory, a checkpoint, an export, `models:/NAME@ALIAS`, or a name on the Hub.
        train: training examples; without `valid` and `test`, a tenth of them is split off for each, by `split_seed`
            (a tenth of the contexts of SQuAD's json).
        valid: examples that select the learning rate and the epoch.
        test: the data the reported scores are computed on (without it and with `valid`: the valid data).
        quoting: whether quotation marks of tsv and csv enclose cells, or are plain characters.
        on_bad_row: what becomes of a row with an empty or invalid cell: it is refused, or skipped and counted.
        output: new directory for model, report, scores and curves.
        task: one of `classification`, `multilabel_classification`, `pair_classification`, `regression`,
            `token_classification`, `question_answering` and `embedding`.
        text_column: default `text`, or `anchor` for embedding.
        pair_column: second text, question, or negative of a triplet.
        label_column: default `label`, or `positive` for embedding.
        compare: variants to fit: `full` (encoder and head), `frozen` (the head alone), `scratch` (both from random
            weights).
        seeds: fits per variant; the first one tries every learning rate, the others take the best.
        learning_rates: default: three around a usual one for the size of the encoder.
        batch_size: examples per step.
        early_stopping: epochs without a better valid score before a fit ends; default: never.
        metric: the metric that selects; default: accuracy, spearman, f1 or ndcg_at_10, depending on the task.
        max_length: maximum tokens per example; default: that of the model.
        pooling: for embedding, `mean` or `cls`.
        matryoshka: for embedding, sizes to which vectors may be cut; the whole ones are fitted too.
        register: name under which the best model is registered, with `alias` if given.
        log: called with each block of progress text; default: nothing is printed.

    Raises:
        UserError: files, columns, model or arguments do not fit the task, every fit diverges, or the output directory
            cannot be written.
    """
    given = dict(locals())  # before any other name
    log = given.pop("log") or (lambda text: None)
    settings = FinetuneSettings(**given)
    with options_as_parameters():
        check_settings(settings)
        return fit_experiment(prepare_experiment(settings, log), log)


def prepare_experiment(settings: FinetuneSettings, log: Callable[[str], None]) -> Experiment:
    """Read the data, open the model, encode, and log a description of both with an estimate of the time."""
    from trainer.finetuning.experiment import prepare
    from trainer.finetuning.report import describe, estimate_lines

    experiment = prepare(settings)
    log("\n".join(describe(experiment)))
    log("\n".join(estimate_lines(experiment)))
    return experiment


def fit_experiment(experiment: Experiment, log: Callable[[str], None]) -> FinetuneResult:
    """Fit every variant, report, save the best model, and register it if requested."""
    from trainer.finetuning.experiment import Best, VariantResult, run_variant
    from trainer.finetuning.experiment_runs import ExperimentRuns
    from trainer.finetuning.fitted_model import save_fitted_model
    from trainer.finetuning.report import Comparison

    settings, data, metric = experiment.settings, experiment.data, experiment.metric
    output, best, results = Path(settings.output), Best(metric), list[VariantResult]()
    report = Comparison(data, metric, results)
    tracking = tracking_settings(settings) if settings.is_tracked else None
    _make_output(output)
    choice, description = "give another --experiment", _description(experiment)
    with ExperimentRuns(tracking, output, choice, description=description) as runs:
        runs.parent.log_params(_run_params(experiment))
        for variant in experiment.learning_rates:
            results.append(run_variant(experiment, variant, runs.child, best.keep))
            log(report.progress_line(results[-1]))
        text = "\n".join(report.lines())
        log(f"\n{text}")  # before anything is written, so that a full disk loses no result
        picture = report.write(output, f"{settings.task}: {settings.files.train.name}", text)
        folder = output / "model"
        model, fit = best.kept
        save_fitted_model(model, experiment.encoder, folder, _fit_facts(experiment, fit), runs.parent.run_id)
        report.log(runs.parent, text, picture)
        log(
            f"\ncurves: {output / 'curves.png'}\nmodel: {folder}\n"
            f"saved: {fit.variant}, seed {fit.seed}, learning rate {fit.learning_rate:g}, selected by valid "
            f"{metric} {fit.valid_scores[metric]:.4f} ({report.valid_yardstick()})"
        )
    if runs.parent.view_hint:
        log(f"metrics: {runs.parent.view_hint}")
    result = FinetuneResult(folder, metric, tuple(results), text, data.reported_baseline)
    if settings.register is None:
        return result
    registration = _register(settings, folder, runs.parent.run_id)
    origin = ", the model from random weights," if fit.variant == "scratch" else ""
    log(f"registered {registration.name} version {registration.version}{origin} at {registration.server}")
    server = _server_option(settings)
    command, file = ("embed", "vectors.npy") if settings.task == "embedding" else ("predict", "FILE")
    log(f"  clozeworks {command} --model {quote(registration.model_uri)}{server} --input FILE --output {file}")
    return replace(result, registration=registration)


def _description(experiment: Experiment) -> str:
    """Return what MLflow shows on the page of the run; no local paths."""
    settings, scored, variants = experiment.settings, experiment.data.scored_on, list(experiment.learning_rates)
    task, first = settings.task.replace("_", " "), "full" if "full" in variants else variants[0]
    return (
        f"`{_base_model(settings)}`, fine-tuned for {task} on `{settings.files.train.name}`: {', '.join(variants)}. "
        "Every child run is one fit.\n\n"
        f"Look at `{first}/{experiment.metric}_mean` first: the mean over the seeds on the {scored} examples. "
        f"`baseline/{experiment.metric}` is the score of a guess that reads no text. The artifact `report.txt` has all "
        "scores."
    )


def _base_model(settings: FinetuneSettings) -> str:
    return str(settings.model) if is_address(settings.model) else Path(settings.model).absolute().name


def _run_params(experiment: Experiment) -> dict[str, Any]:
    settings, data = experiment.settings, experiment.data
    names = ("task", "split_seed", "seeds", "epochs", "batch_size", "early_stopping")
    return {name: getattr(settings, name) for name in names} | {
        **_columns(settings),
        **_of_vectors(settings),
        "model": str(settings.model),
        "no_quoting": not settings.quoting,
        **({"on_bad_row": settings.on_bad_row} if settings.on_bad_row != "refuse" else {}),
        "variants": ",".join(experiment.learning_rates),
        "num_examples": data.num_examples,
        "files": {part: str(path) for part, path in settings.files.given.items()},
        "metric": experiment.metric,
        "max_length": data.preprocessor.max_length,
        "learning_rates": experiment.learning_rates,
    }


def _fit_facts(experiment: Experiment, fit: Fit) -> FitFacts:
    from trainer.finetuning.fitted_card import FitFacts

    settings, data = experiment.settings, experiment.data
    of_fit = ("variant", "learning_rate", "seed", "best_epoch", "valid_scores", "scores")
    return FitFacts(
        **{name: getattr(settings, name) for name in ("task", "quoting")},
        **_columns(settings),
        **_of_vectors(settings),
        **{name: getattr(fit, name) for name in of_fit},
        base_model=_base_model(settings),
        max_length=data.preprocessor.max_length,
        num_examples=data.num_examples,
        scored_on=data.scored_on,
        baseline=data.task.yardstick(data.train_labels)[1],
        baseline_scores=data.reported_baseline,
        train_sha256=storage.sha256_of(settings.files.train),
        scored_sha256=settings.files.examples_sha256(data.scored_on, settings.split_seed),
    )


def _columns(settings: FinetuneSettings) -> dict[str, Any]:
    columns = settings.columns
    return {"text_column": columns.text, "pair_column": columns.pair, "label_column": columns.label}


def _of_vectors(settings: FinetuneSettings) -> dict[str, Any]:
    if settings.task != "embedding":
        return {}
    return {"pooling": settings.pooling, "matryoshka": list(settings.matryoshka)}


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
    """Return the option that names the MLflow server in a printed command."""
    return "".join(f" {quote(word)}" for word in server_options(settings.tracking_uri))
