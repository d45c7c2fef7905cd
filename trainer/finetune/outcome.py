"""What comes of a fine-tuning: the best model, the report, and what MLflow is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from data_prep.base.settings import validate_settings
from data_prep.base.terminal import counted, duration
from data_prep.storage import storage
from trainer.config.run_settings import TrackingSettings
from trainer.finetune.comparison import failure_lines, length_lines, rate_lines, score_lines
from trainer.finetune.experiment import Fit, Setting, VariantResult
from trainer.finetune.experiment_runs import ExperimentRuns
from trainer.finetune.fit_plan import FitRequest
from trainer.finetune.fitted_model import FitFacts, save_fitted_model
from trainer.finetune.single_fit import order
from trainer.tracking.mlflow_server import resolve_tracking_uri

NUM_FAILURES = 5


@dataclass
class Best:
    """The fitted model with the best valid score so far; only that one is held."""

    metric: str
    model: PreTrainedModel | None = None
    fit: Fit | None = None

    def keep(self, model: PreTrainedModel, one: Fit) -> None:
        if self.fit is None or order(one.valid_scores, self.metric) > order(self.fit.valid_scores, self.metric):
            self.model, self.fit = model, one


def progress_line(result: VariantResult, metric: str) -> str:
    """A variant's figure in one line, once all of it is fitted."""
    seconds = sum(one.seconds for one in result.fits)
    fits = counted(len(result.fits), "chosen fit")
    return f"{result.variant}: {metric} {result.shown(metric)}; {fits} in {duration(seconds)}"


def report_lines(setting: Setting, results: list[VariantResult]) -> Iterator[str]:
    """The whole outcome for people: scores, chosen rates, scores by length, and what the best models got wrong."""
    data = setting.data
    yield from score_lines(results, data.task.metrics, setting.metric, data.test is not None)
    yield from rate_lines(results, setting.metric)
    best = [result.best(setting.metric) for result in results]
    yield ""
    yield from length_lines(best, data)
    for one in best:
        yield ""
        yield from failure_lines(one, data, NUM_FAILURES)


def write_scores(path: Path, setting: Setting, results: list[VariantResult]) -> None:
    """The report's figures as JSON: by variant each seed's scores, their mean and standard deviation, and the rates."""
    data = setting.data
    value = {
        "task": data.task.name,
        "metric": setting.metric,
        "scored_on": "test" if data.test is not None else "valid",
        "num_examples": {name: len(part.examples) for name, part in data.parts.items()},
        "variants": {result.variant: _figures(result, data.task.metrics) for result in results},
    }
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _figures(result: VariantResult, metrics: tuple[str, ...]) -> dict[str, Any]:
    spreads = {metric: result.mean_and_spread(metric) for metric in metrics}
    return {
        "learning_rate": result.learning_rate,
        "valid_score_by_rate": {f"{rate:g}": score for rate, score in result.tried.items()},
        "mean": {metric: mean for metric, (mean, _) in spreads.items()},
        "spread": {metric: spread for metric, (_, spread) in spreads.items()},
        "fits": [
            {"seed": one.seed, "best_epoch": one.best_epoch, "seconds": round(one.seconds, 1), "scores": one.scores}
            for one in result.fits
        ],
    }


def tracking_settings(request: FitRequest) -> TrackingSettings | None:
    """Where the runs go; None for nowhere.

    Raises:
        UsageError: MLflow takes no experiment of that name.
    """
    if request.no_tracking:
        return None
    uri = resolve_tracking_uri(request.tracking_uri)
    named = {"uri": uri, "experiment": request.experiment, "run_name": f"{request.task}-{request.train.stem}"}
    return validate_settings(TrackingSettings, named, "the command line")


def log_results(
    runs: ExperimentRuns,
    results: list[VariantResult],
    report: str,
    setting: Setting,
    picture: Path,
) -> None:
    """Means and spreads to the parent run, with report and picture."""
    scores: dict[str, float] = {}
    for result in results:
        for metric in setting.data.task.metrics:
            mean, spread = result.mean_and_spread(metric)
            scores |= {f"{result.variant}/{metric}_mean": mean, f"{result.variant}/{metric}_spread": spread}
    runs.parent.log(0, scores)
    runs.parent.log_artifact_text("report.txt", report + "\n")
    runs.parent.log_artifact(picture.name, picture.read_bytes())


def save_best(best: Best, setting: Setting, request: FitRequest, run_id: str | None) -> Path:

    assert best.model is not None and best.fit is not None, "there was a fit"
    one, data = best.fit, setting.data
    named_by_path = not request.model.startswith(("models:/", "runs:/"))
    facts = FitFacts(
        task=request.task,
        base_model=Path(request.model).name if named_by_path else request.model,
        variant=one.variant,
        text_column=request.text_column,
        pair_column=request.pair_column,
        label_column=request.label_column,
        max_length=setting.preprocessor.max_length,
        learning_rate=one.learning_rate,
        seed=one.seed,
        best_epoch=one.best_epoch,
        num_examples={name: len(part.examples) for name, part in data.parts.items()},
        valid_scores=one.valid_scores,
        scores=one.scores,
        scored_on="test" if data.test is not None else "valid",
        train_sha256=storage.sha256_of(request.train),
    )
    folder = request.output / "model"
    save_fitted_model(best.model, setting.model_folder, folder, facts, run_id)
    return folder
