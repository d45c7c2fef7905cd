"""One fit: the Hugging Face Trainer trains a model on rows, scores it after each epoch, and restores the best epoch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
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
from trainer.distributed.allocator import keep_freed_memory
from trainer.finetuning.finetune_settings import FitSettings
from trainer.finetuning.tasks import Output
from trainer.inference.batches import Collator, row_length
from trainer.inference.preprocessor import Row
from trainer.model.quiet_transformers import quiet_transformers

TRAIN_LOSSES_PER_EPOCH = 10
FEWEST_GROUPED_BATCHES = 1000
"""The Trainer sorts groups of 50 batches by length. With fewer batches than this an epoch would be a few sorted runs,
and its order nearly the same each time."""
_LOGITS = ("logits", "start_logits", "end_logits")

Score = Callable[[torch.nn.Module], dict[str, float]]
"""Gives a model's loss and metrics on the valid rows."""


class FitPoint(NamedTuple):
    """A value on a curve, with the metric's name in MLflow: train/loss, valid/loss, valid/accuracy."""

    epoch: float
    step: int
    name: str
    value: float


@dataclass(frozen=True)
class FitResult:
    """The curves, and the scores of the epoch whose weights the model has."""

    points: tuple[FitPoint, ...]
    best_epoch: int
    scores: dict[str, float]


class Diverged(UserError):
    """A fit diverged: the model's outputs are not finite."""


def order(scores: Mapping[str, float], metric: str) -> tuple[float, float]:
    """Return the sort key of a fit or an epoch, greater for the better one: the metric, then the lower loss."""
    return sign_of(metric) * scores[metric], -scores["loss"]


def sign_of(metric: str) -> int:
    """Return -1 for an error, of which lower is better, else 1."""
    return -1 if metric == "rmse" else 1


def fit(
    model: PreTrainedModel,
    rows: Sequence[Row],
    collate: Collator,
    score: Score,
    metric: str,
    settings: FitSettings,
    *,
    learning_rate: float,
    seed: int,
    record: Callable[[FitPoint], None] = lambda point: None,
) -> FitResult:
    """Train the parameters that have gradients; the valid `score` selects the epoch whose weights stay, unless
    `settings.keep` is last.

    The seed determines everything random; the head was initialized before.

    Raises:
        Diverged: the outputs are not finite after the first epoch.
    """
    watch = _Watch(metric, settings, record)
    steps_per_epoch = -(-len(rows) // settings.batch_size)
    if not torch.cuda.is_available():
        keep_freed_memory()
    with tempfile.TemporaryDirectory(prefix="clozeworks-") as folder, quiet_transformers():
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=settings.epochs,
            per_device_train_batch_size=settings.batch_size,
            learning_rate=learning_rate,
            warmup_steps=settings.warmup_share,
            weight_decay=settings.weight_decay,
            adam_beta2=settings.adam_beta2,
            adam_epsilon=settings.adam_epsilon,
            max_grad_norm=settings.max_gradient_norm,
            train_sampling_strategy="group_by_length" if groups_by_length(rows, settings.batch_size) else "random",
            logging_steps=max(1, steps_per_epoch // TRAIN_LOSSES_PER_EPOCH),
            eval_strategy="epoch",
            save_strategy="no",
            seed=seed,
            data_seed=seed,
            use_cpu=not torch.cuda.is_available(),
            dataloader_pin_memory=torch.cuda.is_available(),
            remove_unused_columns=False,
            disable_tqdm=True,
            report_to="none",
        )
        arguments._n_gpu = min(arguments.n_gpu, 1)  # each of several GPUs would get a batch of this size
        trainer = _Trainer(
            model=model,
            args=arguments,
            data_collator=collate,
            train_dataset=list(rows),
            eval_dataset=[],  # `score` has the valid rows
            callbacks=[watch],
        )
        trainer.score = score
        trainer.remove_callback(PrinterCallback)
        try:
            trainer.train()
        except Diverged:
            if not watch.best_scores or settings.keep == "last":
                raise
    watch.restore_best(model)
    return FitResult(tuple(watch.points), watch.best_epoch, watch.best_scores)


def groups_by_length(rows: Sequence[Row], batch_size: int) -> bool:
    """Return whether training batches hold rows of similar length, so that there is little padding."""
    return "input_ids" in rows[0] and len(rows) >= FEWEST_GROUPED_BATCHES * batch_size


def predict(
    model: torch.nn.Module, rows: Sequence[Row], collate: Collator, batch_size: int
) -> tuple[list[Output], float]:
    """Return the outputs of every row in order, without padding, and the mean loss (NaN for rows without labels).

    The loss is the mean over rows of their batches' losses.
    """
    was_training = model.training
    model.eval()
    outputs: list[Output] = [{}] * len(rows)
    loss_sum = 0.0
    for indices, batch in collate.by_length(rows, batch_size, next(model.parameters()).device):
        with torch.inference_mode():
            of_batch = model(**batch)
        loss_sum += float(of_batch.loss) * len(indices) if of_batch.get("loss") is not None else float("nan")
        arrays = {name: of_batch[name].float().cpu().numpy() for name in _LOGITS if name in of_batch}
        for position, index in enumerate(indices):
            outputs[index] = _output_of_row(arrays, position, row_length(rows[index]))
    model.train(was_training)
    return outputs, loss_sum / max(1, len(rows))


def _output_of_row(arrays: dict[str, np.ndarray], position: int, length: int) -> Output:
    """Return one row of each array: logits (num_labels,) of a text, or those of its tokens without padding."""
    output = {}
    for name, array in arrays.items():
        is_by_token = array.ndim == 3 or name != "logits"
        output[name] = (array[position, :length] if is_by_token else array[position]).copy()
    return output


class _Trainer(Trainer):
    """The Trainer with our evaluation: tasks score whole examples, not padded arrays of logits."""

    score: Score

    def evaluate(self, *unused: Any, **unused_too: Any) -> dict[str, float]:
        assert self.model is not None
        metrics = {f"eval_{name}": value for name, value in self.score(self.model).items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class _Watch(TrainerCallback):
    """Records every logged value, and keeps the weights of the best epoch in memory.

    The Trainer's own way to keep the best epoch writes the whole model to disk after each.
    """

    def __init__(self, metric: str, settings: FitSettings, record: Callable[[FitPoint], None]) -> None:
        self._metric = metric
        self._patience = settings.early_stopping
        self._keeps_last = settings.keep == "last"
        self._record = record
        self._best_weights: dict[str, torch.Tensor] = {}
        self._improved_epoch = 0
        """The last epoch in which the metric itself got better."""
        self.best_epoch = 0
        self.best_scores: dict[str, float] = {}
        self.points: list[FitPoint] = []

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        logs: dict[str, Any] = given["logs"]
        for name, value in logs.items():
            if name in ("loss", "learning_rate", "grad_norm"):
                name = f"train/{name}"
            elif name.startswith("eval_"):
                name = f"valid/{name.removeprefix('eval_')}"
            else:
                continue  # its own timings at the end
            self.points.append(FitPoint(float(state.epoch or 0.0), state.global_step, name, float(value)))
            self._record(self.points[-1])

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> TrainerControl:
        metrics: dict[str, float] = given["metrics"]
        scores = {name.removeprefix("eval_"): value for name, value in metrics.items() if name.startswith("eval_")}
        epoch = round(state.epoch or 0)
        if not self.best_scores or order(scores, self._metric)[0] > order(self.best_scores, self._metric)[0]:
            self._improved_epoch = epoch
        if self._keeps_last:
            self.best_epoch, self.best_scores = epoch, scores
        elif not self.best_scores or order(scores, self._metric) > order(self.best_scores, self._metric):
            self.best_epoch, self.best_scores = epoch, scores
            trained = given["model"].named_parameters()
            self._best_weights = {
                name: parameter.detach().to("cpu", copy=True) for name, parameter in trained if parameter.requires_grad
            }
        if self._patience is not None and epoch - self._improved_epoch >= self._patience:
            control.should_training_stop = True
        return control

    def restore_best(self, model: PreTrainedModel) -> None:
        """Restore the weights of the best epoch."""
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, weight in self._best_weights.items():
                parameters[name].copy_(weight)
