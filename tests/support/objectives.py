"""What a step and a test make of a model's objectives."""

from __future__ import annotations

import functools

import torch

from trainer.objectives.objective import StageObjectives
from trainer.objectives.pretraining import Output, PretrainingModel


def all_objectives(model: torch.nn.Module) -> StageObjectives:
    """Every objective of a model, trained with weight 1."""
    assert isinstance(model, PretrainingModel)
    return StageObjectives(model.objectives, dict.fromkeys(model.objectives, 1.0))


def loss_sum(output: Output) -> torch.Tensor:
    """The losses of all objectives over a micro-batch, ()."""
    return functools.reduce(torch.add, (sums["loss"] for sums in output.values()))
