"""The interface of an objective: a head on the encoder, the loss of a micro-batch, and its metrics.

An objective of a user's own is a class in a file of theirs, which `objectives` names as `module:Class`. The class
subclasses `Objective`, builds its head in `__init__`, and has two methods: `num_predictions` and `scores`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import nn

from data_prep.base.errors import UserError
from trainer.config.custom_code import OBJECTIVE, is_custom
from trainer.config.model_settings import ModelSettings
from trainer.config.run_settings import HealthSettings
from trainer.data.batch import Batch
from trainer.model.encoder import Encoder

Sums = Mapping[str, torch.Tensor]
"""Sums over the predictions of a micro-batch by name, each of shape (); `loss` carries the gradient."""


def seed_micro_batch(seed: int, step: int, number: int) -> None:
    """Seed torch's generators from (seed, step, micro-batch in the global batch), so that dropout follows no rank."""
    state = np.random.SeedSequence([seed, step, number]).generate_state(1, np.uint64)
    torch.manual_seed(int(state[0]))


class EncodedBatch:
    """A micro-batch, and the encoder's hidden states for it, which are computed once for all objectives."""

    def __init__(self, batch: Batch, encoder: Encoder) -> None:
        self.batch, self.encoder = batch, encoder
        self.sums: dict[str, Callable[[EncodedBatch], Sums]] = {}
        """How to get the sums of objectives that another one computes with its own, by name."""
        self.of_layers: list[torch.Tensor] | None = None
        """(T, hidden_size) of each layer once `hidden_states` are there, if an objective put a list here before."""
        self.shared: dict[str, Any] = {}
        """What objectives compute once for each other, by a name of theirs."""

    @cached_property
    def hidden_states(self) -> torch.Tensor:
        """(T, hidden_size) of the last layer; the encoder runs only if an objective reads them."""
        hidden_states: torch.Tensor = self.encoder(self.batch, of_layers=self.of_layers)
        return hidden_states


class Scores(NamedTuple):
    """The N single predictions of a micro-batch; entries that are not `used` have no meaning."""

    positions: torch.Tensor
    """(N,) int64: index into (T,) of the token of each prediction, by which `valid/*` groups by source and length."""
    used: torch.Tensor
    """(N,) bool: which entries are predictions."""
    values: Sums
    """(N,) each: `loss`, and the others of `Objective.values`."""


class Objective(nn.Module):
    """One loss of pretraining. The submodules of an objective are submodules of the model (`PretrainingModel`).

    Training and evaluation report the mean of each of `values` over all predictions of a global batch, or of the valid
    split: `train/{metric}_loss`, `valid/{metric}_accuracy`. The loss of a run is the weighted sum of
    the mean losses of all objectives.
    """

    metric: ClassVar[str] = ""
    """The name within names of metrics: lower case, without the first words of other metrics (`build.py`)."""
    values: ClassVar[tuple[str, ...]] = ("loss",)
    """Names of the values that `scores` returns for each prediction; `loss` comes first, the others may be any."""
    training_values: ClassVar[tuple[str, ...] | None] = None
    """The values that training reports too; None for all."""
    name = ""
    """The name in settings, set when the objective is built."""
    label = ""
    """The name in log lines; empty for `metric`."""

    def __init__(self, config: ModelSettings) -> None:
        super().__init__()
        self.config = config

    def num_predictions(self, batch: Batch) -> int:
        """Return how many predictions `scores` uses of a micro-batch in host memory; their sum divides the loss."""
        raise NotImplementedError

    def scores(self, encoded: EncodedBatch) -> Scores:
        """Return the single predictions, on the batch's device.

        A head reads `encoded.hidden_states`, (T, hidden_size). `encoded.batch` has the tokens and their original ids
        (`Batch.masked_positions`, `Batch.labels`). Random numbers come from torch's global generator, which is seeded
        for each micro-batch, so that they depend neither on the rank nor on the number of ranks.
        """
        raise NotImplementedError

    def initialize(self) -> None:
        """Set initial weights that differ from the model's initialization, which has run before this call.

        Torch's generator is seeded. Without this method matrices are drawn as those of the model, biases are 0 and
        norms 1, whatever `__init__` set.
        """

    def share_sums(self, encoded: EncodedBatch) -> None:
        """Say in `encoded`, before any sum is computed, what the objective computes with or for others."""

    def checked_sums(self, encoded: EncodedBatch) -> Sums:
        """Return `forward`, with all training values.

        Raises:
            ValueError: a value is missing or is not a sum.
        """
        sums: Sums = encoded.sums[self.name](encoded) if self.name in encoded.sums else self(encoded)
        wanted = self.training_values or self.values
        if wrong := [name for name in wanted if name not in sums or sums[name].shape]:
            raise ValueError(f"forward gives no sum of shape () for {', '.join(wrong)}")
        return sums

    def checked_scores(self, encoded: EncodedBatch) -> Scores:
        """Return `scores`, with all values and one shape.

        Raises:
            ValueError: a value is missing, or of another shape.
        """
        scores = self.scores(encoded)
        shapes: dict[str, torch.Size | None] = {"positions": scores.positions.shape, "used": scores.used.shape}
        shapes |= {name: scores.values[name].shape if name in scores.values else None for name in self.values}
        if len({*shapes.values()}) != 1 or len(scores.used.shape) != 1:
            given = ", ".join(f"{name} {'missing' if each is None else tuple(each)}" for name, each in shapes.items())
            raise ValueError(f"scores are not of one shape (N,): {given}")
        return scores._replace(positions=torch.where(scores.used, scores.positions, 0))

    def forward(self, encoded: EncodedBatch) -> Sums:
        """Return the sums of `training_values`; an objective overrides it where sums are cheaper than scores."""
        scores = self.checked_scores(encoded)
        return {
            name: torch.where(scores.used, scores.values[name], 0.0).sum()
            for name in self.training_values or self.values
        }

    def compile_parts(self, backend: str) -> None:
        """Compile parts of the objective, with static shapes (`PretrainingModel.compile_blocks`)."""

    def warning(self, step: int, means: Mapping[str, float], settings: HealthSettings) -> str | None:
        """Return a warning if a mean of `training_values` over the last steps is implausible, else None."""
        return None


@contextlib.contextmanager
def explained(name: str) -> Iterator[None]:
    """Turn an exception in an objective of the user's into an error that names its file and line.

    Raises:
        UserError: see above. An out-of-memory error passes unchanged: the run explains it.
    """
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if not is_custom(name):
            raise
        raise OBJECTIVE.failed(name, error) from error


@dataclass(frozen=True)
class StageObjectives:
    """The objectives of a run, and which of them a stage trains."""

    objectives: Mapping[str, Objective]
    """Objectives of the run by name."""
    weights: Mapping[str, float]
    """Weights of the objectives that the stage trains, by name."""

    @cached_property
    def columns(self) -> tuple[tuple[str, str], ...]:
        """The sums of a step: name of an objective and of one of its values; the same in all stages of a run."""
        return tuple(
            (name, value)
            for name, objective in self.objectives.items()
            for value in objective.training_values or objective.values
        )

    def num_predictions(self, micro_batches: Sequence[Batch]) -> dict[str, int]:
        """Return the number of predictions by objective of the run; 0 for those that the stage leaves out."""
        counts = dict.fromkeys(self.objectives, 0)
        for name in self.weights:
            with explained(name):
                counts[name] = sum(int(self.objectives[name].num_predictions(batch)) for batch in micro_batches)
        return counts

    def stacked(self, output: Mapping[str, Sums], like: torch.Tensor) -> torch.Tensor:
        """Return the sums of a micro-batch, (len(columns),) float64; 0 of what is not in `output`."""
        nothing = like.new_zeros(())
        found = (output[name][value].detach().double() if name in output else nothing for name, value in self.columns)
        return torch.stack([*found])

    def loss(self, output: Mapping[str, Sums], predictions: Mapping[str, int]) -> torch.Tensor:
        """Return the share of a micro-batch's sums in the loss of a global batch with so many predictions by name."""
        means = [sums["loss"] / (max(predictions[name], 1) / self.weights[name]) for name, sums in output.items()]
        return functools.reduce(torch.add, means)
