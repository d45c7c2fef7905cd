"""An experiment: one or more ways to fit a task, each with a few learning rates and several seeds.

The ways (variants): `full` trains the pretrained encoder with its head, `frozen` the head alone, `scratch` both from
random weights, as the control. The first seed tries every learning rate; the others go on with the best.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Protocol

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from trainer.finetune.batches import Collator, predict
from trainer.finetune.frozen import encoder_taken_out, freeze_encoder, store_hidden_states
from trainer.finetune.single_fit import Diverged, FitSettings, Point, fit, order
from trainer.finetune.task_data import Part, TaskData
from trainer.finetune.tasks import Prediction, Preprocessor, Row
from trainer.inference.pretrained import load_pretrained, refuse_random_weights

VARIANTS = ("scratch", "frozen", "full")


@dataclass(frozen=True)
class Setting:
    """What all fits share."""

    model_folder: Path
    data: TaskData
    preprocessor: Preprocessor
    """What encoded the data."""
    collate: Collator
    metric: str
    learning_rates: dict[str, tuple[float, ...]]
    """By variant."""
    seeds: tuple[int, ...] = (0, 1, 2)
    epochs: int = 3
    batch_size: int = 32
    early_stopping: int | None = None


@dataclass(frozen=True)
class Fit:
    """One fit: its curves, its scores on valid and on what is reported, and its predictions for that."""

    variant: str
    seed: int
    learning_rate: float
    points: tuple[Point, ...]
    best_epoch: int
    seconds: float
    valid_scores: dict[str, float]
    scores: dict[str, float]
    predictions: list[Prediction] = field(repr=False)


@dataclass(frozen=True)
class VariantResult:
    """All fits of a variant; `fits` are those of the chosen learning rate, one for each seed."""

    variant: str
    learning_rate: float
    tried: dict[float, float]
    """Learning rate to valid score of the first seed."""
    fits: tuple[Fit, ...]
    diverged: tuple[float, ...] = ()
    """Learning rates that came to nothing."""

    def best(self, metric: str) -> Fit:
        """The fit with the best valid score."""
        return max(self.fits, key=lambda one: order(one.valid_scores, metric))

    def mean_and_spread(self, metric: str) -> tuple[float, float]:
        """Mean and standard deviation over the seeds; of one seed the deviation is 0."""
        values = [one.scores[metric] for one in self.fits]
        return fmean(values), stdev(values) if len(values) > 1 else 0.0

    def shown(self, metric: str) -> str:
        """The same for people; of one seed no deviation is known, and none is shown."""
        mean, spread = self.mean_and_spread(metric)
        return f"{mean:.4f} ± {spread:.4f}" if len(self.fits) > 1 else f"{mean:.4f}"


class FitLog(Protocol):
    """Where a fit's curve and scores go while it runs."""

    def record(self, point: Point) -> None: ...
    def fail(self) -> None: ...
    def finish(self, one: Fit) -> None: ...


def run_variant(
    setting: Setting,
    variant: str,
    open_log: Callable[[str, int, float], FitLog],
    keep: Callable[[PreTrainedModel, Fit], None],
) -> VariantResult:
    """Fit one variant with every learning rate and seed; `keep` is shown each fitted model, whole, with its fit.

    Raises:
        Diverged: no learning rate leads anywhere. Another seed that diverges with the chosen one is told and left out.
    """
    rows = _Rows(setting, variant)
    first, *others = setting.seeds
    tried: dict[float, Fit] = {}
    diverged: list[float] = []
    for rate in setting.learning_rates[variant]:
        try:
            tried[rate] = _fit_once(setting, variant, first, rate, rows, open_log, keep)
        except Diverged:
            diverged.append(rate)
            if len(diverged) == len(setting.learning_rates[variant]):
                raise
    rate = max(tried, key=lambda rate: order(tried[rate].valid_scores, setting.metric))
    fits = [tried[rate]]
    for seed in others:
        try:
            fits.append(_fit_once(setting, variant, seed, rate, rows, open_log, keep))
        except Diverged as error:
            print(f"warning: {error}; this seed is left out", file=sys.stderr, flush=True)
    scores = {rate: one.valid_scores[setting.metric] for rate, one in tried.items()}
    return VariantResult(variant, rate, scores, tuple(fits), tuple(diverged))


def make_model(setting: Setting, variant: str, seed: int) -> PreTrainedModel:
    """The model of a variant before its fit, float32; the head (from scratch all of it) follows from the seed."""
    transformers.set_seed(seed)
    task = setting.data.task
    folder, purpose = setting.model_folder, f"a model for {task.name}"
    model, missing = load_pretrained(task.auto_class, folder, purpose, **task.head_options())
    encoder = model.base_model_prefix + "."
    inside = frozenset(name for name in missing if name.startswith(encoder))  # what is outside is the new head
    refuse_random_weights(inside, folder, "a pretrained encoder", but=("pooler.",))
    if variant == "scratch":
        model = getattr(transformers, task.auto_class).from_config(model.config).eval()
    if variant == "frozen":
        freeze_encoder(model)
    if task.name == "regression":
        labels = setting.data.train.examples.labels or []
        with torch.no_grad():  # a head that begins at the mean need not learn it at a small rate
            bias = model.get_submodule("classifier").bias
            assert isinstance(bias, torch.Tensor)
            bias.fill_(fmean(labels))
    if torch.cuda.is_available():
        model.to("cuda")  # type: ignore[arg-type]  # transformers wraps `to` and loses its overloads
    return model


class _Rows:
    """The rows of a variant by part; a frozen encoder's hidden states are computed when first asked for, once."""

    def __init__(self, setting: Setting, variant: str) -> None:
        self._setting = setting
        self._frozen = variant == "frozen"
        self._stored: dict[int, list[Row]] = {}

    def of(self, part: Part, model: PreTrainedModel) -> Sequence[Row]:
        if not self._frozen:
            return part.encoded.rows
        if id(part) not in self._stored:
            rows = part.encoded.rows
            self._stored[id(part)] = store_hidden_states(model, rows, self._setting.collate, self._setting.batch_size)
        return self._stored[id(part)]


def _fit_once(
    setting: Setting,
    variant: str,
    seed: int,
    rate: float,
    rows: _Rows,
    open_log: Callable[[str, int, float], FitLog],
    keep: Callable[[PreTrainedModel, Fit], None],
) -> Fit:
    data, started_at = setting.data, time.perf_counter()
    log = open_log(variant, seed, rate)
    model = make_model(setting, variant, seed)
    by_part = {name: rows.of(part, model) for name, part in data.parts.items()}
    settings = FitSettings(rate, seed, setting.epochs, setting.batch_size, setting.early_stopping)
    with _as_fitted(model, variant):
        evaluate = _evaluation(setting, data.valid, by_part["valid"])
        try:
            result = fit(model, by_part["train"], setting.collate, evaluate, setting.metric, settings, log.record)
        except Diverged as error:
            log.fail()
            raise Diverged(f"{variant}, seed {seed}, learning rate {rate:g}: {error}") from None
        reported = by_part["test"] if data.test is not None else by_part["valid"]
        outputs, _ = predict(model, reported, setting.collate, setting.batch_size)
    part = data.reported
    predictions = data.task.decode(outputs, part.encoded, part.examples)
    one = Fit(
        variant,
        seed,
        rate,
        result.points,
        result.best_epoch,
        time.perf_counter() - started_at,
        result.scores,
        data.task.score(part.examples.labels or [], predictions),
        predictions,
    )
    log.finish(one)
    keep(model, one)
    return one


@contextmanager
def _as_fitted(model: PreTrainedModel, variant: str) -> Iterator[Any]:
    with encoder_taken_out(model) if variant == "frozen" else nullcontext():
        yield


def _evaluation(setting: Setting, part: Part, rows: Sequence[Row]) -> Callable[[torch.nn.Module], dict[str, float]]:
    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        outputs, loss = predict(model, rows, setting.collate, setting.batch_size)
        if not all(np.isfinite(logits).all() for output in outputs for logits in output.values()):
            scale = " or labels nearer to 1" if setting.data.task.name == "regression" else ""
            raise Diverged(
                f"the fit diverged, its outputs are not finite any more; give smaller --learning-rates{scale}"
            )
        predictions = setting.data.task.decode(outputs, part.encoded, part.examples)
        return {"loss": loss, **setting.data.task.score(part.examples.labels or [], predictions)}

    return evaluate
