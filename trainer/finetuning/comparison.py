"""Report of an experiment: scores side by side, curves in one picture, and the worst errors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from data_prep.base.errors import UserError
from data_prep.base.terminal import counted, duration
from trainer.finetuning.experiment import Fit, VariantResult
from trainer.finetuning.fit import sign_of
from trainer.finetuning.task_data import TaskData
from trainer.finetuning.tasks import ExamplePrediction
from trainer.inference.fill_mask import shorten
from trainer.tracking.figures import Curve, draw_curves
from trainer.tracking.tracker import MetricLog

NUM_LENGTH_GROUPS = 4
NUM_FAILURES = 5


@dataclass(frozen=True)
class Comparison:
    """The results of the variants on their data; `metric` selected the rates, the epochs and the best fit."""

    data: TaskData
    metric: str
    results: Sequence[VariantResult]

    def lines(self) -> Iterator[str]:
        """Yield the report: scores beside their yardstick, learning rates, scores by length, and errors."""
        best = [result.best(self.metric) for result in self.results]
        yield from self.score_lines()
        yield f"{self.data.task.baseline_name}: {self.data.task.yardstick(self.data.train_labels)[1]}"
        yield from self.yardstick_warnings()
        yield from self.rate_lines()
        yield ""
        yield from self._length_lines(best)
        for one in best:
            yield ""
            yield from self._failure_lines(one)

    def score_lines(self) -> Iterator[str]:
        """Yield a row per variant, the best one first, with mean and deviation over the seeds; the yardstick last."""
        task, num_seeds = self.data.task, len(self.results[0].fits)
        part = "test" if self.data.scored_on == "test" else "valid, which also chose the learning rate and epoch"
        spread = f"mean ± standard deviation over {num_seeds} seeds"
        yield f"scores on {part}; {spread if num_seeds > 1 else 'one seed (--seeds 3 shows the spread)'}"
        yield _row("variant", "rate", task.metrics)
        by_score = -sign_of(self.metric)
        for result in sorted(self.results, key=lambda one: by_score * one.mean_and_spread(self.metric)[0]):
            cells = [_mean_and_spread(result, metric) for metric in task.metrics]
            yield _row(result.variant, f"{result.learning_rate:g}", cells)
        scores = self.data.reported_baseline
        yield _row(task.baseline_name, "-", [figure(scores[metric]) for metric in task.metrics])

    def yardstick_warnings(self) -> Iterator[str]:
        """Yield warnings about variants whose predictions hardly vary, or are not better than the yardstick."""
        task, labels = self.data.task, self.data.reported.examples.labels or []
        selected, metric = self.metric, "rmse" if "rmse" in task.metrics else self.metric
        yardstick = self.data.reported_baseline[metric]  # of regression rmse, for correlations notice no wrong scale
        for result in self.results:
            if task.is_constant(labels, result.best(selected).predictions):
                yield (
                    f"warning: {result.variant}: the predictions are nearly the same for every text, so the fit "
                    "learned hardly more than the most likely label; try more epochs or other --learning-rates"
                )
            mean, _ = result.mean_and_spread(metric)
            if sign_of(metric) * (mean - yardstick) <= 0:
                hint = "" if metric == selected else f"; --metric {metric} selects by it"
                yield (
                    f"warning: {result.variant} is not better than {task.baseline_name} on {self.data.scored_on}: "
                    f"{metric} {figure(mean)} and {figure(yardstick)}{hint}"
                )

    def rate_lines(self) -> Iterator[str]:
        """Yield the valid scores that selected the learning rates."""
        for result in self.results:
            tried = ", ".join(f"{rate:g}: {figure(score)}" for rate, score in result.tried.items())
            what = f"{result.variant}: valid {self.metric} of the first seed by learning rate"
            yield f"{what}: {tried}; {self.valid_yardstick()}{_edge(result)}"
            if result.diverged:
                rates = ", ".join(f"{rate:g}" for rate in result.diverged)
                yield f"warning: {result.variant}: fits at learning rate {rates} diverged and are excluded"

    def valid_yardstick(self) -> str:
        """Return the valid score of the yardstick in words."""
        return f"{self.data.task.baseline_name} {figure(self.data.baseline_scores('valid')[self.metric])}"

    def progress_line(self, result: VariantResult) -> str:
        """Return the score of a variant in one line, once it is fitted completely."""
        score = f"{result.variant}: {self.metric} {_mean_and_spread(result, self.metric)}"
        yardstick = f"{self.data.task.baseline_name} {figure(self.data.reported_baseline[self.metric])}"
        seconds = duration(sum(one.seconds for one in result.fits))
        return f"{score} ({yardstick}); {counted(len(result.fits), 'chosen fit')} in {seconds}"

    def write(self, output: Path, title: str, text: str) -> bytes:
        """Write the curves, the report's text, and as JSON the scores of each seed; return the picture."""
        picture = self._curves(title)
        scores = json.dumps(self._scores(), indent=1)
        try:
            (output / "curves.png").write_bytes(picture)
            (output / "report.txt").write_text(text + "\n", encoding="utf-8")
            (output / "scores.json").write_text(scores + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"{output} cannot be written ({error.strerror or error})",
                fix="free the disk or give another output directory, and fit again",
                code="unwritable-file",
            ) from None
        return picture

    def log(self, run: MetricLog, text: str, picture: bytes) -> None:
        """Log means, spreads and the yardstick to the parent run, with the report's text and picture."""
        scores = {f"baseline/{name}": value for name, value in self.data.reported_baseline.items()}
        for result in self.results:
            for metric in self.data.task.metrics:
                mean, spread = result.mean_and_spread(metric)
                scores |= {f"{result.variant}/{metric}_mean": mean, f"{result.variant}/{metric}_spread": spread}
        run.log(0, scores)
        run.log_artifact_text("report.txt", text + "\n")
        run.log_artifact("curves.png", picture)

    def _length_lines(self, fits: Sequence[Fit]) -> Iterator[str]:
        """Yield the scores by length of the text, in quarters of the examples."""
        task, lengths = self.data.task, self.data.reported.encoded.num_tokens
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        size = -(-len(order) // NUM_LENGTH_GROUPS)
        columns = {one.variant: self._example_scores(one.predictions) for one in fits}
        columns[task.baseline_name] = self._example_scores(self.data.baseline(self.data.scored_on))
        yield f"{task.example_score} by length of the text"
        yield f"{'tokens':<14}{'examples':>9}" + "".join(f"{name:>11}" for name in columns)
        for start in range(0, len(order), size):
            group = order[start : start + size]
            span = f"{lengths[group[0]]:,} to {lengths[group[-1]]:,}"
            means = [figure(fmean(scores[number] for number in group)) for scores in columns.values()]
            yield f"{span:<14}{len(group):>9,}" + "".join(f"{mean:>11}" for mean in means)

    def _failure_lines(self, one: Fit) -> Iterator[str]:
        """Yield the worst predictions of a fit, those with the highest probability first among equals."""
        examples, task = self.data.reported.examples, self.data.task
        labels, scores = examples.labels or [], self._example_scores(one.predictions)
        sign = -1.0 if task.example_score == "error" else 1.0
        order = sorted(
            range(len(scores)), key=lambda number: (sign * scores[number], -(one.predictions[number].probability or 0))
        )
        worst = [number for number in order if sign < 0 or scores[number] < 1.0][:NUM_FAILURES]
        names = {"error": "largest errors", "accuracy": "most confident wrong predictions"}
        what = names.get(task.example_score, "worst predictions")
        yield f"{what} of {one.variant} (seed {one.seed}):" if worst else f"{one.variant} makes no errors"
        for number in worst:
            guess, text = one.predictions[number], examples.texts[number]
            sure = f" ({guess.probability:.2f})" if guess.probability is not None else ""
            display = shorten(text if isinstance(text, str) else " ".join(text))
            if examples.pairs is not None:
                display += f" | {shorten(examples.pairs[number])}"
            label, predicted = (shorten(task.show_label(each)) for each in (labels[number], guess.label))
            yield f"  is {label}, predicted {predicted}{sure}: {display}"

    def _example_scores(self, predictions: Sequence[ExamplePrediction]) -> list[float]:
        labels = self.data.reported.examples.labels or []
        return [self.data.task.score_example(label, guess) for label, guess in zip(labels, predictions, strict=True)]

    def _curves(self, title: str) -> bytes:
        """Draw train loss, valid loss and valid score of every variant over the epochs, as one PNG."""
        loss, score = {}, {}
        for result in self.results:
            loss[result.variant] = {kind: _mean_curve(result.fits, f"{kind}/loss") for kind in ("train", "valid")}
            score[result.variant] = {"valid": _mean_curve(result.fits, f"valid/{self.metric}")}
        num_seeds = len(self.results[0].fits)
        bands = f"; means of {num_seeds} seeds, the bands from lowest to highest" if num_seeds > 1 else ""
        return draw_curves([("loss", loss), (self.metric, score)], "epoch", title + bands)

    def _scores(self) -> dict[str, Any]:
        """Return by variant the scores of each seed, their mean and deviation, and the rates, beside the yardstick."""
        data, variants = self.data, {}
        for result in self.results:
            spreads = {metric: result.mean_and_spread(metric) for metric in data.task.metrics}
            fits = [
                {"seed": one.seed, "best_epoch": one.best_epoch, "seconds": round(one.seconds, 1), "scores": one.scores}
                for one in result.fits
            ]
            variants[result.variant] = {
                "learning_rate": result.learning_rate,
                "valid_score_by_rate": {f"{rate:g}": score for rate, score in result.tried.items()},
                "mean": {metric: mean for metric, (mean, _) in spreads.items()},
                "spread": {metric: spread for metric, (_, spread) in spreads.items()},
                "fits": fits,
            }
        baseline = {
            "name": data.task.baseline_name,
            "predicts": data.task.yardstick(data.train_labels)[1],
            "scores": data.reported_baseline,
            "valid_scores": data.baseline_scores("valid"),
        }
        facts = {"task": data.task.name, "metric": self.metric, "scored_on": data.scored_on}
        return {**facts, "num_examples": data.num_examples, "baseline": baseline, "variants": variants}


def _row(name: str, rate: str, cells: Sequence[str]) -> str:
    return f"{name:<9}{rate:>9}" + "".join(f"{cell:>18}" for cell in cells)


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
