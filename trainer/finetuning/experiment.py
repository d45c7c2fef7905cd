"""An experiment: one or more variants of fitting a task, each with a few learning rates and several seeds.

The variant `full` trains the pretrained encoder with a head, `frozen` the head alone, and `scratch` both from random
weights, as the control. The first seed tries every learning rate; the others take the best.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from data_prep.base.logs import logger
from trainer.finetuning.finetune_settings import FinetuneSettings
from trainer.finetuning.fit import Diverged, FitPoint, fit, order, predict
from trainer.finetuning.frozen import check_room, encoder_taken_out, freeze_encoder, store_hidden_states
from trainer.finetuning.task_data import TaskData, encode_task, read_task
from trainer.finetuning.tasks import ExamplePrediction, choosing_metric
from trainer.inference.preprocessor import Collator, Preprocessor, Row
from trainer.inference.pulled_model import hugging_face_folder
from trainer.model.pretrained import load_config, load_pretrained, refuse_random_weights
from trainer.tracking.tracker import MetricLog

LOG = logger(__name__)

FROZEN_RATES = (1e-3, 3e-3, 1e-2)

OpenRun = Callable[[str, Mapping[str, Any]], AbstractContextManager[MetricLog]]
"""Opens the run of one fit by its name and parameters."""


@dataclass(frozen=True)
class Experiment:
    """Model, data and settings of all fits, fixed before the first fit."""

    settings: FinetuneSettings
    encoder: Path
    """Folder of the pretrained model."""
    data: TaskData
    metric: str
    """Name of the metric whose value on valid selects learning rate, epoch and the best fit."""
    learning_rates: dict[str, tuple[float, ...]]
    """By variant, in the order in which they are fitted."""
    seeds: tuple[int, ...] = (0, 1, 2)

    @property
    def collate(self) -> Collator:
        return self.data.task.collator(self.data.preprocessor)


@dataclass(frozen=True)
class Fit:
    """One fit: the curves, scores on the valid and the reported part, and predictions for the reported part."""

    variant: str
    seed: int
    learning_rate: float
    points: Sequence[FitPoint]
    best_epoch: int
    seconds: float
    valid_scores: dict[str, float]
    scores: dict[str, float]
    predictions: list[ExamplePrediction] = field(repr=False)


@dataclass(frozen=True)
class VariantResult:
    """The fits of a variant with the best learning rate, one per seed."""

    variant: str
    learning_rate: float
    tried: dict[float, float]
    """Valid score of the first seed by learning rate."""
    fits: tuple[Fit, ...]
    diverged: tuple[float, ...] = ()
    """Learning rates whose fits diverged."""

    def best(self, metric: str) -> Fit:
        return max(self.fits, key=lambda one: order(one.valid_scores, metric))

    def scores(self, metric: str) -> list[float]:
        """Return the score of each seed."""
        return [one.scores[metric] for one in self.fits]

    def mean_and_spread(self, metric: str) -> tuple[float, float]:
        """Return mean and standard deviation over the seeds; 0 is the deviation of one seed."""
        values = self.scores(metric)
        return fmean(values), stdev(values) if len(values) > 1 else 0.0


class Best:
    """The fitted model with the best valid score so far; no other model is kept in memory."""

    def __init__(self, metric: str) -> None:
        self._metric = metric
        self._kept: tuple[PreTrainedModel, Fit] | None = None

    @property
    def kept(self) -> tuple[PreTrainedModel, Fit]:
        assert self._kept is not None, "there was a fit"
        return self._kept

    def keep(self, model: PreTrainedModel, one: Fit) -> None:
        if self._kept is None or order(one.valid_scores, self._metric) > order(self.kept[1].valid_scores, self._metric):
            self._kept = model, one


def prepare(settings: FinetuneSettings) -> Experiment:
    """Read the data, open the model, encode, and fix what the fits share; without learning rates, the usual ones."""
    task, examples = read_task(settings.task, settings.files, settings.columns, settings.split_seed)
    metric = choosing_metric(task, settings.metric)
    encoder = hugging_face_folder(settings.model, settings.tracking_uri)
    preprocessor = Preprocessor.load(encoder).limited(settings.max_length)
    hidden_size = load_config(encoder).hidden_size
    task = task.configured(settings.pooling, settings.matryoshka, hidden_size)
    data = encode_task(task, examples, preprocessor)
    given = tuple(dict.fromkeys(settings.learning_rates))
    rates = {variant: given or usual_rates(variant, hidden_size) for variant in settings.variants}
    experiment = Experiment(settings, encoder, data, metric, rates, tuple(range(settings.seeds)))
    if "frozen" in rates:
        rows = [row for part in data.parts.values() for row in part.encoded.rows]
        check_room(make_model(experiment, "frozen", 0), rows)
    return experiment


def usual_rates(variant: str, hidden_size: int) -> tuple[float, ...]:
    """Return learning rates around the usual one for a hidden size.

    The usual one is proportional to hidden_size ** -1.5, at most 1e-3: 5e-5 at 768 and 3e-5 at 1,024, which are among
    the rates of Devlin et al. 2018, and 7e-4 at 128, the best of three for `small_cpu` on SST-2
    (tests/benchmarks/results).
    """
    if variant == "frozen":
        return FROZEN_RATES
    usual = min(5e-5 * (768 / hidden_size) ** 1.5, 1e-3)
    return tuple(float(f"{usual * factor:.1e}") for factor in ((1, 2, 4) if variant == "scratch" else (0.5, 1, 2)))


def run_variant(
    experiment: Experiment, variant: str, open_run: OpenRun, keep: Callable[[PreTrainedModel, Fit], None]
) -> VariantResult:
    """Fit one variant with every learning rate and seed; `keep` gets each complete fitted model with its fit.

    Raises:
        Diverged: every learning rate diverges. A later seed that diverges is left out with a warning.
    """
    rows = _rows_of(experiment, variant)
    first, *others = experiment.seeds
    tried: dict[float, Fit] = {}
    diverged: list[float] = []
    for rate in experiment.learning_rates[variant]:
        try:
            tried[rate] = _fit_once(experiment, variant, first, rate, rows, open_run, keep)
        except Diverged:
            diverged.append(rate)
            if len(diverged) == len(experiment.learning_rates[variant]):
                raise
    rate = max(tried, key=lambda rate: order(tried[rate].valid_scores, experiment.metric))
    fits = [tried[rate]]
    for seed in others:
        try:
            fits.append(_fit_once(experiment, variant, seed, rate, rows, open_run, keep))
        except Diverged as error:
            LOG.warning(f"{error.problem}; this seed is excluded")
    scores = {rate: one.valid_scores[experiment.metric] for rate, one in tried.items()}
    return VariantResult(variant, rate, scores, tuple(fits), tuple(diverged))


def make_model(experiment: Experiment, variant: str, seed: int) -> Any:
    """Return the float32 model of a variant before the fit; the seed determines the head (scratch: all weights)."""
    transformers.set_seed(seed)
    task = experiment.data.task
    folder, purpose = experiment.encoder, f"a model for {task.name}"
    model, missing = load_pretrained(task.auto_class, folder, purpose, **task.head_options())
    encoder = "" if task.auto_class == "AutoModel" else model.base_model_prefix + "."
    inside = frozenset(name for name in missing if name.startswith(encoder))  # the rest is the new head
    refuse_random_weights(inside, folder, "a pretrained encoder", but=("pooler.",))
    if variant == "scratch":
        model = getattr(transformers, task.auto_class).from_config(model.config).eval()
    if variant == "frozen":
        freeze_encoder(model)
    module = task.module(model, experiment.data.preprocessor.max_length)
    return module.to("cuda") if torch.cuda.is_available() else module


def _rows_of(experiment: Experiment, variant: str) -> dict[str, Sequence[Row]]:
    """Return the rows of each part; for `frozen` with the hidden states of the encoder, which no seed changes."""
    rows: dict[str, Sequence[Row]] = {name: part.encoded.rows for name, part in experiment.data.parts.items()}
    if variant != "frozen":
        return rows
    model, size = make_model(experiment, variant, experiment.seeds[0]), experiment.settings.batch_size
    return {name: store_hidden_states(model, some, experiment.collate, size) for name, some in rows.items()}


def _fit_once(
    experiment: Experiment,
    variant: str,
    seed: int,
    rate: float,
    rows: dict[str, Sequence[Row]],
    open_run: OpenRun,
    keep: Callable[[PreTrainedModel, Fit], None],
) -> Fit:
    data, title = experiment.data, f"{variant}, seed {seed}, learning rate {rate:g}"
    name, params = f"{variant}-seed{seed}-rate{rate:g}", {"variant": variant, "seed": seed, "learning_rate": rate}
    started_at = time.perf_counter()
    with open_run(name, params) as run:
        model = make_model(experiment, variant, seed)
        with encoder_taken_out(model) if variant == "frozen" else nullcontext():
            result = fit(
                model,
                rows["train"],
                experiment.collate,
                lambda model: _scored(experiment, model, "valid", rows["valid"], title)[1],
                experiment.metric,
                experiment.settings,
                learning_rate=rate,
                seed=seed,
                record=lambda point: run.log(point.step, {point.name: point.value}),
            )
            predictions, scores = _scored(experiment, model, data.scored_on, rows[data.scored_on], title)
        scores.pop("loss")
        data.task.finish(model)
        seconds = time.perf_counter() - started_at
        reported = {f"reported/{name}": value for name, value in scores.items()}
        run.log(result.points[-1].step, {**reported, "best_epoch": result.best_epoch, "fit_seconds": seconds})
    one = Fit(variant, seed, rate, result.points, result.best_epoch, seconds, result.scores, scores, predictions)
    keep(model, one)
    return one


def _scored(
    experiment: Experiment, model: torch.nn.Module, part_name: str, rows: Sequence[Row], title: str
) -> tuple[list[ExamplePrediction], dict[str, float]]:
    """Return the predictions for a part, and the scores with the loss; `title` names the fit in an error."""
    task, part = experiment.data.task, experiment.data.parts[part_name]
    outputs, loss = predict(model, rows, experiment.collate, experiment.settings.batch_size)
    if not all(np.isfinite(logits).all() for output in outputs for logits in output.values()):
        raise Diverged(
            f"{title}: the fit diverged: its outputs are not finite",
            fix="give smaller --learning-rates",
            code="fit-diverged",
        )
    predictions = task.decode(outputs, part.encoded, part.examples)
    return predictions, {"loss": loss, **task.score(part.labels, predictions)}
