"""The optimizer that DeepSpeed wraps, by `optimizer.name`; weight decay applies to matrices only.

name             states                                        source
adamw            exp_avg, exp_avg_sq                           Loshchilov and Hutter 2017 (arXiv 1711.05101)
stable_adamw     exp_avg, exp_avg_sq                           `trainer/engine/stable_adamw.py`
muon             momentum of the matrices inside the blocks,   `trainer/engine/muon.py`
                 exp_avg and exp_avg_sq of the others
module:function  its own                                       `trainer/engine/custom_optimizer.py`
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import nn

from trainer.config.custom_code import is_custom
from trainer.config.training_settings import OptimizerSettings
from trainer.distributed.process_group import Ranks
from trainer.engine import fragments
from trainer.engine.custom_optimizer import build_custom_optimizer, explain_failure
from trainer.engine.whole_parameters import AttachesPartition


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the trainable parameters as a group with decay (two dimensions or more) and one without (biases, norms).

    A tied parameter is in one group, once; an empty group is left out. `decays` marks the group whose decay a stage of
    the run may change.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices, others = ([p for p in trainable if (p.dim() >= 2) == is_matrix] for is_matrix in (True, False))
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": weight_decay, "decays": True},
        {"params": others, "weight_decay": 0.0, "decays": False},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, settings: OptimizerSettings, precision: str = "fp32") -> torch.optim.Optimizer:
    """Return the optimizer of the model's whole parameters; AdamW's fused kernel runs on CUDA and on the CPU.

    `precision` is that of the forward pass (`training.precision`).
    """
    groups = parameter_groups(model, settings.weight_decay)
    rate, betas, eps = settings.learning_rate, (settings.beta1, settings.beta2), settings.eps
    optimizer: torch.optim.Optimizer
    if is_custom(settings.name):
        optimizer = build_custom_optimizer(groups, settings)
    elif settings.name == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=rate, betas=betas, eps=eps, fused=True)
    elif settings.name == "stable_adamw":
        from trainer.engine.stable_adamw import StableAdamW

        optimizer = StableAdamW(groups, lr=rate, betas=betas, eps=eps)
    else:
        from trainer.engine.muon import Muon

        assert isinstance(model, fragments.HasBlocks), "roles come from the model"
        groups = [part for group in groups for part in _by_role(group, model.hidden_matrices())]
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        optimizer = Muon(groups, lr=rate, betas=betas, eps=eps, momentum=settings.momentum, dtype=dtype)
    _attach(optimizer, settings.name, lambda: fragments.undivided(model, optimizer))
    return optimizer


def _by_role(group: dict[str, Any], matrices: Container[torch.Tensor]) -> list[dict[str, Any]]:
    """Split a group into the matrices inside the blocks and the others; an empty part is left out."""
    parts = [
        {**group, "params": [p for p in group["params"] if (p in matrices) == orthogonal], "orthogonal": orthogonal}
        for orthogonal in (True, False)
    ]
    return [part for part in parts if part["params"]]


def attach_partition(module: nn.Module, optimizer: Any, name: str, zero_stage: int, ranks: Ranks) -> None:
    """Give an optimizer of whole parameters the partition among the tensors of DeepSpeed's `optimizer`."""
    base = fragments.base_optimizer(optimizer, zero_stage)
    _attach(base, name, lambda: fragments.partition_of(module, optimizer, zero_stage, ranks))


def _attach(optimizer: torch.optim.Optimizer, name: str, partition: Callable[[], fragments.Partition]) -> None:
    if isinstance(optimizer, AttachesPartition):
        found = partition()
        with explain_failure(name, calls_it=True):
            optimizer.attach(found)
