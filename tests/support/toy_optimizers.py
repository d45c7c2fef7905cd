"""Optimizers as a user may bring them, `tests.support.toy_optimizers:NAME`."""

from __future__ import annotations

from typing import Any

import torch

from trainer.config.training_settings import OptimizerSettings
from trainer.engine.fragments import Partition
from trainer.engine.whole_parameters import WholeParameters


class Lion(torch.optim.Optimizer):
    """The sign of a momentum, element by element, without a count of updates (Chen et al. 2023, arXiv 2302.06675)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(weight)
                direction = state["momentum"].lerp(weight.grad, 0.1).sign()
                weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
                state["momentum"].lerp_(weight.grad, 0.01)


def lion(groups: list[dict[str, Any]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    return Lion(groups, {"lr": settings.learning_rate, "weight_decay": settings.weight_decay})


class NormalizedMomentum(torch.optim.Optimizer):
    """Momentum divided by its norm over the whole parameter (Cutkosky and Mehta 2020, arXiv 2002.03305, section 2)."""

    def attach(self, partition: Partition) -> None:
        self._whole = WholeParameters(partition, partition.shapes)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is None:
                    continue
                state = self.state[tensor]
                if not state:
                    state["momentum"] = torch.zeros_like(tensor)
                state["momentum"].lerp_(tensor.grad, 0.1)
                for fragment, update in self._whole.apply(tensor, state["momentum"], self._normalized):
                    weight = fragment.range_of(tensor)
                    weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update.to(weight), alpha=group["lr"])

    def _normalized(self, name: str, momentum: torch.Tensor) -> torch.Tensor:
        return momentum / momentum.norm().clamp(min=1e-12)


def normalized_momentum(groups: list[dict[str, Any]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    return NormalizedMomentum(groups, {"lr": settings.learning_rate, "weight_decay": settings.weight_decay})


def adafactor(groups: list[dict[str, Any]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Has factored states of matrices, which is not element by element."""
    return torch.optim.Adafactor(groups, lr=settings.learning_rate)


def nothing(groups: list[dict[str, Any]], settings: OptimizerSettings) -> None:
    """Returns no optimizer."""


def fail() -> None:
    raise RuntimeError("no shapes")


A_NUMBER = 3
