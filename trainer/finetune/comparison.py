"""What an experiment found, for people: scores side by side, curves in one picture, and where the fits fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from trainer.finetune.experiment import Fit, VariantResult
from trainer.finetune.single_fit import Point
from trainer.finetune.task_data import TaskData
from trainer.inference.fill_mask import shorten
from trainer.tracking.figures import Curve, draw_curves

NUM_LENGTH_GROUPS = 4


def score_lines(results: Sequence[VariantResult], metrics: Sequence[str], metric: str, tested: bool) -> Iterator[str]:
    """A row for each variant: mean and standard deviation over seeds of all `metrics`, the best by `metric` first."""
    part = "test" if tested else "valid, by which rate and epoch were chosen too"
    num_seeds = len(results[0].fits)
    what = (
        f"mean ± standard deviation over {num_seeds} seeds" if num_seeds > 1 else "of one seed (--seeds 3 shows spread)"
    )
    yield f"scores on {part}; {what}"
    yield f"{'variant':<9}{'rate':>9}" + "".join(f"{metric:>18}" for metric in metrics)
    for result in sorted(results, key=lambda one: -one.mean_and_spread(metric)[0]):
        cells = "".join(f"{result.shown(metric):>18}" for metric in metrics)
        yield f"{result.variant:<9}{result.learning_rate:>9g}{cells}"


def rate_lines(results: Sequence[VariantResult], metric: str) -> Iterator[str]:
    """The valid scores by which the learning rates were chosen."""
    for result in results:
        tried = ", ".join(f"{rate:g}: {score:.4f}" for rate, score in result.tried.items())
        yield f"{result.variant}: valid {metric} of the first seed by learning rate: {tried}{_edge(result)}"
        if result.diverged:
            rates = ", ".join(f"{rate:g}" for rate in result.diverged)
            yield f"warning: {result.variant}: fits at learning rate {rates} diverged and are left out"


def draw_comparison(results: Sequence[VariantResult], metric: str, title: str) -> bytes:
    """Loss of train and valid, and the valid score, of every variant over epochs, as one PNG."""
    loss = {
        result.variant: {kind: mean_curve(result.fits, f"{kind}/loss") for kind in ("train", "valid")}
        for result in results
    }
    score = {result.variant: {"valid": mean_curve(result.fits, f"valid/{metric}")} for result in results}
    num_seeds = len(results[0].fits)
    bands = f"; means of {num_seeds} seeds, the bands from lowest to highest" if num_seeds > 1 else ""
    return draw_curves([("loss", loss), (metric, score)], "epoch", title + bands)


def mean_curve(fits: Sequence[Fit], name: str) -> Curve:
    """The mean over seeds at each step that any of them has (early stopping ends some sooner), and the extremes."""
    by_epoch: dict[float, list[float]] = {}
    for one in fits:
        for point in _of_name(one.points, name):
            by_epoch.setdefault(round(point.epoch, 4), []).append(point.value)
    epochs = sorted(by_epoch)
    values = [by_epoch[epoch] for epoch in epochs]
    return Curve(
        epochs, [fmean(some) for some in values], ([min(some) for some in values], [max(some) for some in values])
    )


def length_lines(fits: Sequence[Fit], data: TaskData) -> Iterator[str]:
    """How well texts of different lengths are done, a quarter of the examples each."""
    lengths = data.reported.encoded.num_tokens
    order = sorted(range(len(lengths)), key=lambda number: lengths[number])
    size = -(-len(order) // NUM_LENGTH_GROUPS)
    groups = [order[start : start + size] for start in range(0, len(order), size)]
    labels = data.reported.examples.labels or []
    yield f"{data.task.example_score} by length of the text"
    yield f"{'tokens':<14}{'examples':>9}" + "".join(f"{one.variant:>10}" for one in fits)
    for group in groups:
        span = f"{lengths[group[0]]:,} to {lengths[group[-1]]:,}"
        means = [
            fmean(data.task.score_example(labels[number], one.predictions[number]) for number in group) for one in fits
        ]
        yield f"{span:<14}{len(group):>9,}" + "".join(f"{mean:>10.4f}" for mean in means)


def failure_lines(one: Fit, data: TaskData, count: int) -> Iterator[str]:
    """The examples that a fit does worst, those first of which it is surest."""
    examples, task = data.reported.examples, data.task
    labels = examples.labels or []
    scores = [task.score_example(label, guess) for label, guess in zip(labels, one.predictions, strict=True)]
    sign = -1.0 if task.example_score == "error" else 1.0
    order = sorted(
        range(len(scores)), key=lambda number: (sign * scores[number], -(one.predictions[number].probability or 0.0))
    )
    worst = [number for number in order if sign < 0 or scores[number] < 1.0][:count]
    yield f"where {one.variant} (seed {one.seed}) fails most:" if worst else f"{one.variant} fails nowhere"
    for number in worst:
        guess = one.predictions[number]
        sure = f" ({guess.probability:.2f})" if guess.probability is not None else ""
        text = examples.texts[number]
        shown = shorten(text if isinstance(text, str) else " ".join(text))
        if examples.pairs is not None:
            shown += f" | {shorten(examples.pairs[number])}"
        label, said = shorten(task.show_label(labels[number])), shorten(task.show_label(guess.label))
        yield f"  is {label}, predicted {said}{sure}: {shown}"


def _edge(result: VariantResult) -> str:
    """A hint where the best learning rate is the largest or smallest tried, so that a better one may lie beyond."""
    rates = sorted([*result.tried, *result.diverged])
    if len(rates) < 3 or rates[0] < result.learning_rate < rates[-1]:
        return ""
    beyond = "larger" if result.learning_rate == rates[-1] else "smaller"
    return f" (the best is at the edge: --learning-rates {beyond} than {result.learning_rate:g} may be better)"


def _of_name(points: Sequence[Point], name: str) -> list[Point]:
    return [point for point in points if point.name == name]
