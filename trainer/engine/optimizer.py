"""The optimizer that DeepSpeed wraps, by `optimizer.name`; weight decay applies to matrices only.

name             states                  source
adamw            exp_avg, exp_avg_sq     Loshchilov and Hutter 2017; Devlin et al. 2018, appendix A.2
stable_adamw     exp_avg, exp_avg_sq     `trainer/engine/stable_adamw.py`
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from trainer.config.training_settings import OptimizerSettings
from trainer.distributed.process_group import Ranks
from trainer.engine import fragments
from trainer.engine.stable_adamw import StableAdamW


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters as a group with decay (two dimensions or more) and one without (biases and norms).

    A tied parameter is in one group, once; an empty group is left out.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trainable if parameter.dim() >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trainable if parameter.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Return the optimizer of the model's whole parameters; AdamW's fused kernel runs on CUDA and on the CPU."""
    groups = parameter_groups(model, settings.weight_decay)
    rate, betas, eps = settings.learning_rate, (settings.beta1, settings.beta2), settings.eps
    if settings.name == "stable_adamw":
        return StableAdamW(groups, lr=rate, betas=betas, eps=eps)
    return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=eps, fused=True)


def attach_partitions(module: nn.Module, optimizer: Any, stage: int, ranks: Ranks) -> None:
    """Tell an optimizer that looks at whole parameters what the partitions hold that DeepSpeed's `optimizer` made."""
    base = fragments.base_optimizer(optimizer, stage)
    if isinstance(base, StableAdamW):
        held = list(fragments.fragments(module, optimizer, stage, ranks.rank, ranks.world_size))
        sizes = {name: math.prod(shape) for name, shape in fragments.parameter_shapes(module).items()}
        base.attach(held, sizes, shared_by=ranks if stage else None)
