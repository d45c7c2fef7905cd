"""AdamW with decay on matrices only (Loshchilov and Hutter 2017; Devlin et al. 2018, appendix A.2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainer.config.training_settings import OptimizerSettings


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


def build_optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.AdamW:
    """The optimizer that DeepSpeed wraps; the fused kernel runs on CUDA and on the CPU."""
    return torch.optim.AdamW(
        parameter_groups(model, settings.weight_decay),
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=True,
    )
