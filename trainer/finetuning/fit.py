"""One fit: transformers' Trainer trains a model on rows, scores it after each epoch, and restores the best epoch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers import (
    EarlyStoppingCallback,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from data_prep.base.errors import UserError
from trainer.distributed.memory import keep_freed_memory
from trainer.finetuning.finetune_settings import FitSettings
from trainer.finetuning.tasks import Output
from trainer.inference.preprocessor import Collator, Row, row_length
from trainer.model.quiet_transformers import quiet_transformers

TRAIN_LOSSES_PER_EPOCH = 10
FEWEST_GROUPED_BATCHES = 1000
"""The Trainer sorts groups of 50 batches by length. An epoch of fewer batches would be a few sorted groups, in nearly
the same order every time."""
_LOGITS = ("logits", "start_logits", "end_logits")

Score = Callable[[torch.nn.Module], dict[str, float]]
"""Returns the loss and the metrics of a model on the valid rows."""


class FitPoint(NamedTuple):
    """A value on a curve; `name` is that of the metric in MLflow, such as train/loss or valid/accuracy."""

    epoch: float
    step: int
    name: str
    value: float


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
) -> FitRecord:
    """Train the parameters that require gradients.

    `score` selects the epoch whose weights the model has in the end, unless `settings.keep` is last. The head was
    initialized before; the seed determines everything else that is random.

    Raises:
        Diverged: the outputs are not finite after the first epoch.
    """
    history = FitRecord(metric, settings, record)
    patience = settings.early_stopping
    early_stopping = [] if patience is None else [EarlyStoppingCallback(patience)]
    has_gpu, steps_per_epoch = torch.cuda.is_available(), -(-len(rows) // settings.batch_size)
    if not has_gpu:
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
            metric_for_best_model=metric,
            greater_is_better=sign_of(metric) > 0,
            save_strategy="no",
            seed=seed,
            data_seed=seed,
            use_cpu=not has_gpu,
            dataloader_pin_memory=has_gpu,
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
            callbacks=[history, *early_stopping],
        )
        trainer.score = score
        trainer.batches = collate.training_batches(rows, settings.batch_size, seed)
        trainer.remove_callback(PrinterCallback)
        try:
            trainer.train()
        except Diverged:
            if not history.scores or settings.keep == "last":
                raise
    history.restore_best(model)
    return history


def groups_by_length(rows: Sequence[Row], batch_size: int) -> bool:
    """Return whether a training batch has rows of similar length, so that there is little padding."""
    return "input_ids" in rows[0] and len(rows) >= FEWEST_GROUPED_BATCHES * batch_size


def predict(
    model: torch.nn.Module, rows: Sequence[Row], collate: Collator, batch_size: int
) -> tuple[list[Output], float]:
    """Return the outputs of every row in order, without padding, and the mean loss (NaN for rows without labels).

    The loss is the mean of the losses of the batches, weighted by their rows. `Trainer.predict` would pad the logits of
    all rows to the longest, and batch rows of different lengths.
    """
    model.eval()  # the Trainer sets the mode of training in every step
    outputs: list[Output] = [{}] * len(rows)
    loss_sum = 0.0
    for indices, batch in collate.by_length(rows, batch_size, next(model.parameters()).device):
        with torch.inference_mode():
            of_batch = model(**batch)
        loss_sum += float(of_batch.loss) * len(indices) if of_batch.get("loss") is not None else float("nan")
        arrays = {name: of_batch[name].float().cpu().numpy() for name in _LOGITS if name in of_batch}
        for position, index in enumerate(indices):
            length = row_length(rows[index])
            outputs[index] = {  # logits of a text (num_labels,), or those of its tokens without padding
                name: (array[position] if array.ndim == 2 and name == "logits" else array[position, :length]).copy()
                for name, array in arrays.items()
            }
    return outputs, loss_sum / max(1, len(rows))


class _Trainer(Trainer):
    """The Trainer with an evaluation by `score`: tasks score whole examples, not padded arrays of logits."""

    score: Score
    batches: Any = None
    """A sampler of batches in place of the Trainer's own."""

    def get_train_dataloader(self) -> Any:
        if self.batches is None:
            return super().get_train_dataloader()
        rows: Any = self.train_dataset
        loader: Any = torch.utils.data.DataLoader(rows, batch_sampler=self.batches, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)

    def evaluate(self, *unused: Any, **unused_too: Any) -> dict[str, float]:
        assert self.model is not None
        metrics = {f"eval_{name}": value for name, value in self.score(self.model).items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class FitRecord(TrainerCallback):
    """The curves of a fit, and the scores of the epoch whose weights the model has in the end.

    The record keeps the weights of the best epoch in memory; the Trainer would write the model to disk in every epoch.
    """

    def __init__(self, metric: str, settings: FitSettings, record: Callable[[FitPoint], None]) -> None:
        self._metric, self._keeps_last, self._record = metric, settings.keep == "last", record
        self._best_weights: dict[str, torch.Tensor] = {}
        self.best_epoch = 0
        self.scores: dict[str, float] = {}
        self.points: list[FitPoint] = []

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        logs: dict[str, Any] = given["logs"]
        for name, value in logs.items():
            if name in ("loss", "learning_rate", "grad_norm"):
                name = f"train/{name}"
            elif name.startswith("eval_"):
                name = f"valid/{name.removeprefix('eval_')}"
            else:
                continue  # the Trainer's timings
            self.points.append(FitPoint(float(state.epoch or 0.0), state.global_step, name, float(value)))
            self._record(self.points[-1])

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        metrics: dict[str, float] = given["metrics"]
        scores = {name.removeprefix("eval_"): value for name, value in metrics.items() if name.startswith("eval_")}
        if not (self._keeps_last or not self.scores or order(scores, self._metric) > order(self.scores, self._metric)):
            return
        self.best_epoch, self.scores = round(state.epoch or 0), scores
        if not self._keeps_last:
            trained = given["model"].named_parameters()
            self._best_weights = {
                name: parameter.detach().to("cpu", copy=True) for name, parameter in trained if parameter.requires_grad
            }

    def restore_best(self, model: PreTrainedModel) -> None:
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, weight in self._best_weights.items():
                parameters[name].copy_(weight)
