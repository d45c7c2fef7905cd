"""Reports of a fine-tuning: an estimate before the first fit; scores, curves and the worst errors after the last."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedModel

from data_prep.base.errors import UserError
from data_prep.base.terminal import counted, duration
from trainer.finetuning.experiment import Experiment, Fit, VariantResult, make_model
from trainer.finetuning.fit import groups_by_length, order, sign_of
from trainer.finetuning.frozen import encoder_taken_out, store_hidden_states
from trainer.finetuning.scores import figure, figure_of_seeds
from trainer.finetuning.task_data import TaskData, data_lines
from trainer.finetuning.tasks import ExamplePrediction
from trainer.inference.fill_mask import shorten
from trainer.inference.preprocessor import Collator, Row, row_length
from trainer.tracking.figures import Curve, draw_curves
from trainer.tracking.tracker import MetricLog

NUM_TIMED = 3
NUM_LENGTH_GROUPS = 4
NUM_FAILURES = 5


def describe(experiment: Experiment) -> Iterator[str]:
    """Yield lines about the data and the trained parameters."""
    yield from data_lines(experiment.data)
    model = make_model(experiment, "full", 0)
    for variant in experiment.learning_rates:
        counts = trainable_parameters(model, frozen=variant == "frozen")
        trained = ", ".join(f"{part} {count:,}" for part, count in counts.items())
        yield f"\n{variant}: trained parameters: {trained}"


def estimate_lines(experiment: Experiment) -> Iterator[str]:
    """Yield the estimated time of each variant and their sum."""
    seeds, epochs = len(experiment.seeds), experiment.settings.epochs
    estimates = estimate_seconds(experiment)
    yield ""
    for variant, seconds in estimates.items():
        rates = experiment.learning_rates[variant]
        fits = f"{counted(len(rates) + seeds - 1, 'fit')} of {counted(epochs, 'epoch')}"
        tried = f"rates {', '.join(f'{rate:g}' for rate in rates)}; {counted(seeds, 'seed')}"
        yield f"{variant}: {fits} ({tried}), about {duration(seconds)}"
    yield f"about {duration(sum(estimates.values()))} in total, extrapolated from a few timed steps"


def estimate_seconds(experiment: Experiment) -> dict[str, float]:
    """Return the estimated seconds by variant, without early stopping, from a few timed steps."""
    data, collate, size = experiment.data, experiment.collate, experiment.settings.batch_size
    num_batches = {name: -(-len(part.encoded.rows) // size) for name, part in data.parts.items()}
    model, sample = make_model(experiment, "full", 0), _sample(data.parts["train"].encoded.rows, size)
    whole = [_seconds_per_step(model, sample, collate, train) for train in (True, False)]
    estimates = {}
    for variant, rates in experiment.learning_rates.items():
        (step, read), seconds = whole, 0.0
        if variant == "frozen":
            seconds = read * sum(num_batches.values())
            stored = [store_hidden_states(model, rows, collate, size) for rows in sample]
            with encoder_taken_out(model):
                step, read = (_seconds_per_step(model, stored, collate, train) for train in (True, False))
        one_epoch = num_batches["train"] * step + num_batches["valid"] * read
        one_fit = experiment.settings.epochs * one_epoch + num_batches[data.scored_on] * read
        estimates[variant] = seconds + (len(rates) + len(experiment.seeds) - 1) * one_fit
    return estimates


def trainable_parameters(model: PreTrainedModel, frozen: bool) -> dict[str, int]:
    """Count the trained parameters by part, and in `total`."""
    counts = {"encoder": 0, "pooler": 0, "head": 0}
    for name, parameter in model.named_parameters():
        inside = name.removeprefix(f"{model.base_model_prefix}.")
        part = (
            "head"
            if inside == name and model.base_model is not model
            else "pooler"
            if inside.startswith("pooler.")
            else "encoder"
        )
        counts[part] += parameter.numel()
    if frozen:
        counts.pop("encoder")
    if getattr(model.base_model, "pooler", None) is None:
        counts.pop("pooler")
    return counts | {"total": sum(counts.values())}


@dataclass(frozen=True)
class Comparison:
    """The results of the variants on their data; `metric` selected the rates, the epochs and the best fit."""

    data: TaskData
    metric: str
    results: Sequence[VariantResult]

    def lines(self) -> Iterator[str]:
        """Yield the report: scores beside the yardstick, learning rates, scores by length, and errors."""
        best = [result.best(self.metric) for result in self.results]
        yield from self.score_lines()
        yield f"{self.data.task.baseline_name}: {self.data.task.yardstick(self.data.train_labels)[1]}"
        yield from self.yardstick_warnings()
        yield from self.scratch_warnings()
        yield from self.rate_lines()
        yield ""
        yield from self._length_lines(best)
        for fit in best:
            yield ""
            yield from self._failure_lines(fit)

    def score_lines(self) -> Iterator[str]:
        """Yield a row per variant, the best one first, with mean and deviation over the seeds; the yardstick last."""
        task, num_seeds = self.data.task, len(self.results[0].fits)
        part = "test" if self.data.scored_on == "test" else "valid, which also chose the learning rate and epoch"
        spread = f"mean ± standard deviation over {num_seeds} seeds"
        yield f"scores on {part}; {spread if num_seeds > 1 else 'one seed (--seeds 3 shows the spread)'}"
        yield _row("variant", "rate", task.metrics)
        by_score = -sign_of(self.metric)
        for result in sorted(self.results, key=lambda result: by_score * result.mean_and_spread(self.metric)[0]):
            cells = [figure_of_seeds(result.scores(metric)) for metric in task.metrics]
            yield _row(result.variant, f"{result.learning_rate:g}", cells)
        scores = self.data.reported_baseline
        yield _row(task.baseline_name, "-", [figure(scores[metric]) for metric in task.metrics])

    def yardstick_warnings(self) -> Iterator[str]:
        """Yield warnings about variants whose predictions hardly vary, or are not better than the yardstick."""
        task, labels = self.data.task, self.data.reported.labels
        selected, metric = self.metric, "rmse" if "rmse" in task.metrics else self.metric
        yardstick = self.data.reported_baseline[metric]  # rmse for regression: a correlation ignores a wrong scale
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

    def scratch_warnings(self) -> Iterator[str]:
        """Yield a warning if the best model of several variants, which is saved, has nothing of the encoder."""
        best = [result.best(self.metric) for result in self.results]
        first, *others = sorted(best, key=lambda one: order(one.valid_scores, self.metric), reverse=True)
        if first.variant == "scratch" and others:
            scores = [f"{one.variant} {figure(one.valid_scores[self.metric])}" for one in (first, *others)]
            yield (
                f"warning: scratch has the best valid {self.metric} ({', '.join(scores)}), so the saved model is the "
                "one from random weights, which has nothing of the pretrained encoder; leave scratch out of --compare "
                "to save the best of the others"
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
        return f"{self.data.task.baseline_name} {figure(self.data.baseline_scores('valid')[self.metric])}"

    def progress_line(self, result: VariantResult) -> str:
        """Return the score of a variant, whose fits are complete, in one line."""
        score = f"{result.variant}: {self.metric} {figure_of_seeds(result.scores(self.metric))}"
        yardstick = f"{self.data.task.baseline_name} {figure(self.data.reported_baseline[self.metric])}"
        seconds = duration(sum(fit.seconds for fit in result.fits))
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
        """Yield the scores by length of the text, in quarters of the examples if there are as many lengths."""
        task, lengths = self.data.task, self.data.reported.encoded.num_tokens
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        size = -(-len(order) // min(NUM_LENGTH_GROUPS, len(set(lengths))))
        columns = {fit.variant: self._example_scores(fit.predictions) for fit in fits}
        columns[task.baseline_name] = self._example_scores(self.data.baseline(self.data.scored_on))
        yield f"{task.example_score} by length of the text"
        yield f"{'tokens':<14}{'examples':>9}" + "".join(f"{name:>11}" for name in columns)
        for start in range(0, len(order), size):
            group = order[start : start + size]
            span = f"{lengths[group[0]]:,} to {lengths[group[-1]]:,}"
            means = [figure(fmean(scores[number] for number in group)) for scores in columns.values()]
            yield f"{span:<14}{len(group):>9,}" + "".join(f"{mean:>11}" for mean in means)

    def _failure_lines(self, fit: Fit) -> Iterator[str]:
        """Yield the worst predictions of a fit, those with the highest probability first among equals."""
        examples, task = self.data.reported.examples, self.data.task
        labels, scores = self.data.reported.labels, self._example_scores(fit.predictions)
        sign = -1.0 if task.example_score == "error" else 1.0
        order = sorted(
            range(len(scores)), key=lambda number: (sign * scores[number], -(fit.predictions[number].probability or 0))
        )
        worst = [number for number in order if sign < 0 or scores[number] < 1.0][:NUM_FAILURES]
        names = {"error": "largest errors", "accuracy": "most confident wrong predictions"}
        what = names.get(task.example_score, "worst predictions")
        yield f"{what} of {fit.variant} (seed {fit.seed}):" if worst else f"{fit.variant} makes no errors"
        for number in worst:
            guess, text = fit.predictions[number], examples.texts[number]
            sure = f" ({guess.probability:.2f})" if guess.probability is not None else ""
            display = shorten(text if isinstance(text, str) else " ".join(text))
            if examples.pairs is not None:
                display += f" | {shorten(examples.pairs[number])}"
            label, predicted = (shorten(task.show_label(each)) for each in (labels[number], guess.label))
            yield f"  is {label}, predicted {predicted}{sure}: {display}"

    def _example_scores(self, predictions: Sequence[ExamplePrediction]) -> list[float]:
        pairs = zip(self.data.reported.labels, predictions, strict=True)
        return [self.data.task.score_example(label, guess) for label, guess in pairs]

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
        """Return the content of scores.json: scores of each variant by seed and rate, and the yardstick."""
        data, variants = self.data, {}
        for result in self.results:
            spreads = {metric: result.mean_and_spread(metric) for metric in data.task.metrics}
            fits = [
                {"seed": fit.seed, "best_epoch": fit.best_epoch, "seconds": round(fit.seconds, 1), "scores": fit.scores}
                for fit in result.fits
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


def _sample(rows: Sequence[Row], size: int) -> list[list[Row]]:
    """Return sample batches like those of the fits: random rows, or rows of similar length."""
    draw = random.Random(0)
    rows = sorted(rows, key=row_length) if groups_by_length(rows, size) else draw.sample(rows, len(rows))
    starts = range(0, len(rows), size)
    return [list(rows[start : start + size]) for start in draw.sample(starts, min(NUM_TIMED, len(starts)))]


def _seconds_per_step(model: PreTrainedModel, batches: list[list[Row]], collate: Collator, train: bool) -> float:
    """Return the mean seconds of a step; weights stay unchanged, because the learning rate is 0 at the same cost."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0, weight_decay=0.0)

    def step(rows: Sequence[Row]) -> None:
        batch = {name: value.to(model.device) for name, value in collate(rows).items()}
        with torch.set_grad_enabled(train):
            loss = model(**batch).loss
            if train:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        loss.item()  # a GPU finishes its work only here

    step(batches[0])  # warms up
    started_at = time.perf_counter()
    for rows in batches:
        step(rows)
    return (time.perf_counter() - started_at) / len(batches)


def _row(name: str, rate: str, cells: Sequence[str]) -> str:
    return f"{name:<9}{rate:>9}" + "".join(f"{cell:>18}" for cell in cells)


def _edge(result: VariantResult) -> str:
    """Return a hint if the best learning rate is the largest or smallest tried: a better one may lie beyond it."""
    rates = sorted([*result.tried, *result.diverged])
    if len(rates) < 3 or rates[0] < result.learning_rate < rates[-1]:
        return ""
    beyond = "larger" if result.learning_rate == rates[-1] else "smaller"
    return f" (the best is at the edge: --learning-rates {beyond} than {result.learning_rate:g} may be better)"


def _mean_curve(fits: Sequence[Fit], name: str) -> Curve:
    """Return mean and extremes over the seeds at each step that any of them reached (some may stop early)."""
    by_epoch: dict[float, list[float]] = {}
    for fit in fits:
        for point in fit.points:
            if point.name == name:
                by_epoch.setdefault(round(point.epoch, 4), []).append(point.value)
    epochs = sorted(by_epoch)
    values = [by_epoch[epoch] for epoch in epochs]
    extremes = [min(some) for some in values], [max(some) for some in values]
    return Curve(epochs, [fmean(some) for some in values], extremes)
