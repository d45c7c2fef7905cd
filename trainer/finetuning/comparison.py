"""Report of an experiment: scores side by side, curves in one picture, and the worst errors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from data_prep.base.terminal import counted, duration
from trainer.finetuning.experiment import Experiment, Fit, VariantResult
from trainer.finetuning.task_data import TaskData
from trainer.inference.fill_mask import shorten
from trainer.tracking.figures import Curve, draw_curves
from trainer.tracking.tracker import MetricLog

NUM_LENGTH_GROUPS = 4
NUM_FAILURES = 5


def report_lines(experiment: Experiment, results: Sequence[VariantResult]) -> Iterator[str]:
    """Yield the lines of the report: scores, chosen learning rates, scores by length, and errors of the best models."""
    data, metric = experiment.data, experiment.metric
    yield from score_lines(results, data.task.metrics, metric, data.scored_on)
    yield from rate_lines(results, metric)
    best = [result.best(metric) for result in results]
    yield ""
    yield from length_lines(best, data)
    for one in best:
        yield ""
        yield from failure_lines(one, data, NUM_FAILURES)


def score_lines(results: Sequence[VariantResult], metrics: Sequence[str], metric: str, scored_on: str) -> Iterator[str]:
    """Yield a row per variant, the best by `metric` first: mean and standard deviation of `metrics` over the seeds."""
    part = "test" if scored_on == "test" else "valid, which also chose the learning rate and epoch"
    num_seeds = len(results[0].fits)
    what = (
        f"mean ± standard deviation over {num_seeds} seeds"
        if num_seeds > 1
        else "one seed (--seeds 3 shows the spread)"
    )
    yield f"scores on {part}; {what}"
    yield f"{'variant':<9}{'rate':>9}" + "".join(f"{metric:>18}" for metric in metrics)
    for result in sorted(results, key=lambda one: -one.mean_and_spread(metric)[0]):
        cells = "".join(f"{_mean_and_spread(result, metric):>18}" for metric in metrics)
        yield f"{result.variant:<9}{result.learning_rate:>9g}{cells}"


def rate_lines(results: Sequence[VariantResult], metric: str) -> Iterator[str]:
    """Yield the valid scores that selected the learning rates."""
    for result in results:
        tried = ", ".join(f"{rate:g}: {score:.4f}" for rate, score in result.tried.items())
        yield f"{result.variant}: valid {metric} of the first seed by learning rate: {tried}{_edge(result)}"
        if result.diverged:
            rates = ", ".join(f"{rate:g}" for rate in result.diverged)
            yield f"warning: {result.variant}: fits at learning rate {rates} diverged and are excluded"


def length_lines(fits: Sequence[Fit], data: TaskData) -> Iterator[str]:
    """Yield the scores by length of the text, in quarters of the examples."""
    lengths = data.reported.encoded.num_tokens
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    size = -(-len(order) // NUM_LENGTH_GROUPS)
    scores = [_example_scores(one, data) for one in fits]
    yield f"{data.task.example_score} by length of the text"
    yield f"{'tokens':<14}{'examples':>9}" + "".join(f"{one.variant:>10}" for one in fits)
    for start in range(0, len(order), size):
        group = order[start : start + size]
        span = f"{lengths[group[0]]:,} to {lengths[group[-1]]:,}"
        means = [fmean(of_fit[number] for number in group) for of_fit in scores]
        yield f"{span:<14}{len(group):>9,}" + "".join(f"{mean:>10.4f}" for mean in means)


def failure_lines(one: Fit, data: TaskData, count: int) -> Iterator[str]:
    """Yield the worst predictions of a fit, those with the highest probability first among equals."""
    examples, task = data.reported.examples, data.task
    labels, scores = examples.labels or [], _example_scores(one, data)
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


def progress_line(result: VariantResult, metric: str) -> str:
    """Return the score of a variant in one line, once it is fitted completely."""
    seconds = sum(one.seconds for one in result.fits)
    fits = counted(len(result.fits), "chosen fit")
    return f"{result.variant}: {metric} {_mean_and_spread(result, metric)}; {fits} in {duration(seconds)}"


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


def write_scores(path: Path, experiment: Experiment, results: Sequence[VariantResult]) -> None:
    """Write the report as JSON: by variant the scores of each seed, their mean and deviation, and the rates."""
    data = experiment.data
    value = {
        "task": data.task.name,
        "metric": experiment.metric,
        "scored_on": data.scored_on,
        "num_examples": data.num_examples,
        "variants": {result.variant: _figures(result, data.task.metrics) for result in results},
    }
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def log_results(
    run: MetricLog, experiment: Experiment, results: Sequence[VariantResult], report: str, picture: Path
) -> None:
    """Log means and spreads to the parent run, with report and picture."""
    scores: dict[str, float] = {}
    for result in results:
        for metric in experiment.data.task.metrics:
            mean, spread = result.mean_and_spread(metric)
            scores |= {f"{result.variant}/{metric}_mean": mean, f"{result.variant}/{metric}_spread": spread}
    run.log(0, scores)
    run.log_artifact_text("report.txt", report + "\n")
    run.log_artifact(picture.name, picture.read_bytes())


def _mean_and_spread(result: VariantResult, metric: str) -> str:
    """Return mean and deviation as text; one seed has no deviation."""
    mean, spread = result.mean_and_spread(metric)
    return f"{mean:.4f} ± {spread:.4f}" if len(result.fits) > 1 else f"{mean:.4f}"


def _edge(result: VariantResult) -> str:
    """Return a hint if the best learning rate is the largest or smallest tried, so that a better one may lie beyond."""
    rates = sorted([*result.tried, *result.diverged])
    if len(rates) < 3 or rates[0] < result.learning_rate < rates[-1]:
        return ""
    beyond = "larger" if result.learning_rate == rates[-1] else "smaller"
    return f" (the best is at the edge: --learning-rates {beyond} than {result.learning_rate:g} may be better)"


def _example_scores(one: Fit, data: TaskData) -> list[float]:
    labels = data.reported.examples.labels or []
    return [data.task.score_example(label, guess) for label, guess in zip(labels, one.predictions, strict=True)]


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
