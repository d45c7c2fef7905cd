"""One fit: a model is trained on rows by the Hugging Face Trainer, scored after each epoch, and left at its best."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from data_prep.base.errors import UserError
from trainer.finetune.batches import Collator
from trainer.finetune.tasks import Row
from trainer.model.quiet_transformers import quiet_transformers

TRAIN_LOSSES_AN_EPOCH = 10
FEWEST_GROUPED_BATCHES = 1000
"""The Trainer sorts stretches of 50 batches by length. Of fewer batches than this an epoch would be a few sorted runs,
and its order all but the same each time."""


@dataclass(frozen=True)
class FitSettings:
    """How one fit goes. Warm-up and weight decay are those of Devlin et al. 2018, appendix A.2."""

    learning_rate: float
    seed: int
    epochs: int = 3
    batch_size: int = 32
    early_stopping: int | None = None
    """Epochs without a better score after which the fit ends."""
    weight_decay: float = 0.01
    warmup_share: float = 0.1


class Point(NamedTuple):
    """A value on a curve; names are those of MLflow: train/loss, valid/loss, valid/accuracy."""

    epoch: float
    step: int
    name: str
    value: float


@dataclass(frozen=True)
class FitResult:
    """The curves, and the scores of the epoch whose weights the model has now."""

    points: tuple[Point, ...]
    best_epoch: int
    scores: dict[str, float]


def order(scores: Mapping[str, float], metric: str) -> tuple[float, float]:
    """What the better of two fits, or of two epochs, has more of: the metric, and where that ties a lower loss."""
    return scores[metric], -scores["loss"]


def fit(
    model: PreTrainedModel,
    rows: Sequence[Row],
    collate: Collator,
    score: Callable[[torch.nn.Module], dict[str, float]],
    metric: str,
    settings: FitSettings,
    record: Callable[[Point], None] = lambda point: None,
) -> FitResult:
    """Train the parameters that have gradients; `score` gives the valid loss and metrics, which choose the epoch.

    Everything random follows from the settings' seed; the head was made before.
    """
    keeper = _BestWeights(metric, settings.early_stopping)
    recorder = _Recorder(record)
    steps_an_epoch = -(-len(rows) // settings.batch_size)
    with tempfile.TemporaryDirectory(prefix="clozeworks-") as folder, quiet_transformers():
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=settings.epochs,
            per_device_train_batch_size=settings.batch_size,
            learning_rate=settings.learning_rate,
            warmup_steps=settings.warmup_share,
            weight_decay=settings.weight_decay,
            train_sampling_strategy="group_by_length" if groups_by_length(rows, settings.batch_size) else "random",
            logging_steps=max(1, steps_an_epoch // TRAIN_LOSSES_AN_EPOCH),
            eval_strategy="epoch",
            save_strategy="no",
            seed=settings.seed,
            data_seed=settings.seed,
            use_cpu=not torch.cuda.is_available(),
            dataloader_pin_memory=torch.cuda.is_available(),
            remove_unused_columns=False,
            disable_tqdm=True,
            report_to="none",
        )
        arguments._n_gpu = min(arguments.n_gpu, 1)  # of several GPUs each would be given a batch of this size
        trainer = _Trainer(
            model=model,
            args=arguments,
            data_collator=collate,
            train_dataset=list(rows),
            eval_dataset=[],  # `score` has the valid rows
            callbacks=[keeper, recorder],
        )
        trainer.score = score
        trainer.remove_callback(PrinterCallback)
        try:
            trainer.train()
        except Diverged:
            if not keeper.best_scores:
                raise
    keeper.restore(model)
    return FitResult(tuple(recorder.points), keeper.best_epoch, keeper.best_scores)


def groups_by_length(rows: Sequence[Row], batch_size: int) -> bool:
    """Whether batches are of rows alike in length, so that little is padding."""
    return "input_ids" in rows[0] and len(rows) >= FEWEST_GROUPED_BATCHES * batch_size


class Diverged(UserError):
    """A fit came to nothing: what the model answers is no number any more."""


class _Trainer(Trainer):
    """The Trainer with our evaluation: tasks score whole examples, not padded arrays of logits."""

    score: Callable[[torch.nn.Module], dict[str, float]]

    def evaluate(self, *unused: Any, **unused_too: Any) -> dict[str, float]:
        assert self.model is not None
        metrics = {f"eval_{name}": value for name, value in self.score(self.model).items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class _BestWeights(TrainerCallback):
    """Keeps the trained weights of the best epoch in memory: nothing of an encoder's size is written each epoch."""

    def __init__(self, metric: str, patience: int | None) -> None:
        self._metric = metric
        self._patience = patience
        self._weights: dict[str, torch.Tensor] = {}
        self._improved_epoch = 0
        """The last in which the metric itself rose."""
        self.best_epoch = 0
        self.best_scores: dict[str, float] = {}

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> TrainerControl:
        metrics: dict[str, float] = given["metrics"]
        scores = {name.removeprefix("eval_"): value for name, value in metrics.items() if name.startswith("eval_")}
        epoch = round(state.epoch or 0)
        if not self.best_scores or scores[self._metric] > self.best_scores[self._metric]:
            self._improved_epoch = epoch
        if not self.best_scores or order(scores, self._metric) > order(self.best_scores, self._metric):
            self.best_epoch, self.best_scores = epoch, scores
            trained = given["model"].named_parameters()
            self._weights = {
                name: parameter.detach().to("cpu", copy=True) for name, parameter in trained if parameter.requires_grad
            }
        if self._patience is not None and epoch - self._improved_epoch >= self._patience:
            control.should_training_stop = True
        return control

    def restore(self, model: PreTrainedModel) -> None:
        """Give the model its best weights back."""
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, weight in self._weights.items():
                parameters[name].copy_(weight)


class _Recorder(TrainerCallback):
    """Hands every logged value on as a point."""

    def __init__(self, record: Callable[[Point], None]) -> None:
        self._record = record
        self.points: list[Point] = []

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        logs: dict[str, Any] = given["logs"]
        for name, value in logs.items():
            if name in ("loss", "learning_rate", "grad_norm"):
                name = f"train/{name}"
            elif name.startswith("eval_"):
                name = f"valid/{name.removeprefix('eval_')}"
            else:
                continue  # its own timings at the end
            point = Point(float(state.epoch or 0.0), state.global_step, name, float(value))
            self.points.append(point)
            self._record(point)
