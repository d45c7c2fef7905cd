"""Report of an experiment: scores side by side, curves in one picture, and the worst errors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from data_prep.base.errors import UserError
from data_prep.base.terminal import counted, duration
from trainer.finetuning.experiment import Experiment, Fit, VariantResult
from trainer.finetuning.fit import sign_of
from trainer.finetuning.task_data import TaskData
from trainer.finetuning.tasks import ExamplePrediction
from trainer.inference.fill_mask import shorten
from trainer.tracking.figures import Curve, draw_curves
from trainer.tracking.tracker import MetricLog

NUM_LENGTH_GROUPS = 4
NUM_FAILURES = 5


def report_lines(experiment: Experiment, results: Sequence[VariantResult]) -> Iterator[str]:
    """Yield the lines of the report: scores beside their yardstick, learning rates, scores by length, and errors."""
    data, metric = experiment.data, experiment.metric
    best = [result.best(metric) for result in results]
    yardstick = data.baseline_scores(data.scored_on)
    yield from score_lines(results, data.task.metrics, metric, data.scored_on, (data.task.baseline_name, yardstick))
    yield f"{data.task.baseline_name}: {data.task.baseline_text(data.train_labels)}"
    yield from yardstick_warnings(results, best, data, metric, yardstick)
    yield from rate_lines(results, metric, f"; {valid_yardstick(data, metric)}")
    yield ""
    yield from length_lines(best, data)
    for one in best:
        yield ""
        yield from failure_lines(one, data, NUM_FAILURES)


def score_lines(
    results: Sequence[VariantResult],
    metrics: Sequence[str],
    metric: str,
    scored_on: str,
    yardstick: tuple[str, Mapping[str, float]],
) -> Iterator[str]:
    """Yield a row per variant, the best by `metric` first: mean and standard deviation of `metrics` over the seeds.

    The last row is that of the yardstick, given by its name and scores.
    """
    part = "test" if scored_on == "test" else "valid, which also chose the learning rate and epoch"
    num_seeds = len(results[0].fits)
    what = (
        f"mean ± standard deviation over {num_seeds} seeds"
        if num_seeds > 1
        else "one seed (--seeds 3 shows the spread)"
    )
    yield f"scores on {part}; {what}"
    yield f"{'variant':<9}{'rate':>9}" + "".join(f"{metric:>18}" for metric in metrics)
    for result in sorted(results, key=lambda one: -sign_of(metric) * one.mean_and_spread(metric)[0]):
        cells = "".join(f"{_mean_and_spread(result, metric):>18}" for metric in metrics)
        yield f"{result.variant:<9}{result.learning_rate:>9g}{cells}"
    name, scores = yardstick
    yield f"{name:<9}{'-':>9}" + "".join(f"{figure(scores[metric]):>18}" for metric in metrics)


def valid_yardstick(data: TaskData, metric: str) -> str:
    """Return the valid score of the yardstick in words."""
    return f"{data.task.baseline_name} {figure(data.baseline_scores('valid')[metric])}"


def yardstick_warnings(
    results: Sequence[VariantResult],
    best: Sequence[Fit],
    data: TaskData,
    metric: str,
    yardstick: Mapping[str, float],
) -> Iterator[str]:
    """Yield warnings about variants whose predictions hardly vary, or are not better than the yardstick."""
    task, labels = data.task, data.reported.examples.labels or []
    selected, metric = metric, "rmse" if "rmse" in task.metrics else metric  # correlations notice no wrong scale
    for result, one in zip(results, best, strict=True):
        if task.is_constant(labels, one.predictions):
            yield (
                f"warning: {result.variant}: the predictions are nearly the same for every text, so the fit learned "
                "hardly more than the most likely label; try more epochs or other --learning-rates"
            )
        mean, _ = result.mean_and_spread(metric)
        if sign_of(metric) * (mean - yardstick[metric]) <= 0:
            hint = "" if metric == selected else f"; --metric {metric} selects by it"
            yield (
                f"warning: {result.variant} is not better than {task.baseline_name} on {data.scored_on}: {metric} "
                f"{figure(mean)} and {figure(yardstick[metric])}{hint}"
            )


def rate_lines(results: Sequence[VariantResult], metric: str, yardstick: str = "") -> Iterator[str]:
    """Yield the valid scores that selected the learning rates, and `yardstick` after them."""
    for result in results:
        tried = ", ".join(f"{rate:g}: {figure(score)}" for rate, score in result.tried.items())
        yield f"{result.variant}: valid {metric} of the first seed by learning rate: {tried}{yardstick}{_edge(result)}"
        if result.diverged:
            rates = ", ".join(f"{rate:g}" for rate in result.diverged)
            yield f"warning: {result.variant}: fits at learning rate {rates} diverged and are excluded"


def length_lines(fits: Sequence[Fit], data: TaskData) -> Iterator[str]:
    """Yield the scores by length of the text, in quarters of the examples."""
    lengths = data.reported.encoded.num_tokens
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    size = -(-len(order) // NUM_LENGTH_GROUPS)
    scores = [*(_example_scores(one.predictions, data) for one in fits)]
    scores.append(_example_scores(data.baseline(data.scored_on), data))
    names = [*(one.variant for one in fits), data.task.baseline_name]
    yield f"{data.task.example_score} by length of the text"
    yield f"{'tokens':<14}{'examples':>9}" + "".join(f"{name:>11}" for name in names)
    for start in range(0, len(order), size):
        group = order[start : start + size]
        span = f"{lengths[group[0]]:,} to {lengths[group[-1]]:,}"
        means = [fmean(of_fit[number] for number in group) for of_fit in scores]
        yield f"{span:<14}{len(group):>9,}" + "".join(f"{figure(mean):>11}" for mean in means)


def failure_lines(one: Fit, data: TaskData, count: int) -> Iterator[str]:
    """Yield the worst predictions of a fit, those with the highest probability first among equals."""
    examples, task = data.reported.examples, data.task
    labels, scores = examples.labels or [], _example_scores(one.predictions, data)
    sign = -1.0 if task.example_score == "error" else 1.0
    order = sorted(
        range(len(scores)), key=lambda number: (sign * scores[number], -(one.predictions[number].probability or 0.0))
    )
    worst = [number for number in order if sign < 0 or scores[number] < 1.0][:count]
    what = {"error": "largest errors", "accuracy": "most confident wrong predictions"}.get(
        task.example_score, "worst predictions"
    )
    yield f"{what} of {one.variant} (seed {one.seed}):" if worst else f"{one.variant} makes no errors"
    for number in worst:
        guess = one.predictions[number]
        sure = f" ({guess.probability:.2f})" if guess.probability is not None else ""
        text = examples.texts[number]
        display = shorten(text if isinstance(text, str) else " ".join(text))
        if examples.pairs is not None:
            display += f" | {shorten(examples.pairs[number])}"
        label, predicted = shorten(task.show_label(labels[number])), shorten(task.show_label(guess.label))
        yield f"  is {label}, predicted {predicted}{sure}: {display}"


def progress_line(experiment: Experiment, result: VariantResult) -> str:
    """Return the score of a variant in one line, once it is fitted completely."""
    data, metric = experiment.data, experiment.metric
    yardstick = f"{data.task.baseline_name} {figure(data.baseline_scores(data.scored_on)[metric])}"
    seconds = sum(one.seconds for one in result.fits)
    fits = counted(len(result.fits), "chosen fit")
    score = _mean_and_spread(result, metric)
    return f"{result.variant}: {metric} {score} ({yardstick}); {fits} in {duration(seconds)}"


def draw_comparison(results: Sequence[VariantResult], metric: str, title: str) -> bytes:
    """Draw train loss, valid loss and valid score of every variant over the epochs, as one PNG."""
    loss = {
        result.variant: {kind: _mean_curve(result.fits, f"{kind}/loss") for kind in ("train", "valid")}
        for result in results
    }
    score = {result.variant: {"valid": _mean_curve(result.fits, f"valid/{metric}")} for result in results}
    num_seeds = len(results[0].fits)
    bands = f"; means of {num_seeds} seeds, the bands from lowest to highest" if num_seeds > 1 else ""
    return draw_curves([("loss", loss), (metric, score)], "epoch", title + bands)


def write_report(output: Path, report: str, experiment: Experiment, results: Sequence[VariantResult]) -> Path:
    """Write the curves, the report as text, and as JSON the scores of each seed; return the picture's path.

    Raises:
        UserError: one cannot be written.
    """
    picture, settings = output / "curves.png", experiment.settings
    try:
        title = f"{settings.task}: {settings.files.train.name}"
        picture.write_bytes(draw_comparison(results, experiment.metric, title))
        (output / "report.txt").write_text(report + "\n", encoding="utf-8")
        scores = json.dumps(_scores(experiment, results), indent=1)
        (output / "scores.json").write_text(scores + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{output} cannot be written ({error.strerror or error})",
            fix="free the disk or give another output directory, and fit again",
            code="unwritable-file",
        ) from None
    return picture


def _scores(experiment: Experiment, results: Sequence[VariantResult]) -> dict[str, Any]:
    """Return by variant the scores of each seed, their mean and deviation, and the rates, beside the yardstick."""
    data = experiment.data
    return {
        "task": data.task.name,
        "metric": experiment.metric,
        "scored_on": data.scored_on,
        "num_examples": data.num_examples,
        "baseline": {
            "name": data.task.baseline_name,
            "predicts": data.task.baseline_text(data.train_labels),
            "scores": data.baseline_scores(data.scored_on),
            "valid_scores": data.baseline_scores("valid"),
        },
        "variants": {result.variant: _figures(result, data.task.metrics) for result in results},
    }


def log_results(
    run: MetricLog, experiment: Experiment, results: Sequence[VariantResult], report: str, picture: Path
) -> None:
    """Log means, spreads and the yardstick to the parent run, with report and picture."""
    data = experiment.data
    scores = {f"baseline/{name}": value for name, value in data.baseline_scores(data.scored_on).items()}
    for result in results:
        for metric in data.task.metrics:
            mean, spread = result.mean_and_spread(metric)
            scores |= {f"{result.variant}/{metric}_mean": mean, f"{result.variant}/{metric}_spread": spread}
    run.log(0, scores)
    run.log_artifact_text("report.txt", report + "\n")
    run.log_artifact(picture.name, picture.read_bytes())


def _mean_and_spread(result: VariantResult, metric: str) -> str:
    """Return mean and deviation as text; one seed has no deviation."""
    mean, spread = result.mean_and_spread(metric)
    return f"{figure(mean)} ± {figure(spread)}" if len(result.fits) > 1 else figure(mean)


def figure(value: float) -> str:
    """Return a score with four decimals; an error in the unit of labels can be much smaller or larger than 1."""
    return f"{value:.4f}" if value == 0.0 or 1e-3 <= abs(value) < 1e4 else f"{value:.3g}"


def _edge(result: VariantResult) -> str:
    """Return a hint if the best learning rate is the largest or smallest tried, so that a better one may lie beyond."""
    rates = sorted([*result.tried, *result.diverged])
    if len(rates) < 3 or rates[0] < result.learning_rate < rates[-1]:
        return ""
    beyond = "larger" if result.learning_rate == rates[-1] else "smaller"
    return f" (the best is at the edge: --learning-rates {beyond} than {result.learning_rate:g} may be better)"


def _example_scores(predictions: Sequence[ExamplePrediction], data: TaskData) -> list[float]:
    labels = data.reported.examples.labels or []
    return [data.task.score_example(label, guess) for label, guess in zip(labels, predictions, strict=True)]


def _mean_curve(fits: Sequence[Fit], name: str) -> Curve:
    """Return mean and extremes over the seeds at each step that any of them reached (some may stop early)."""
    by_epoch: dict[float, list[float]] = {}
    for one in fits:
        for point in one.points:
            if point.name == name:
                by_epoch.setdefault(round(point.epoch, 4), []).append(point.value)
    epochs = sorted(by_epoch)
    values = [by_epoch[epoch] for epoch in epochs]
    extremes = [min(some) for some in values], [max(some) for some in values]
    return Curve(epochs, [fmean(some) for some in values], extremes)


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
