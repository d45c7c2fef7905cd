"""The toy training in plain single-process PyTorch, without DeepSpeed: what every stage is compared with."""

from __future__ import annotations

import torch

from tests.support.toy_training import ToyModel, global_batch, labels_of, make_config
from trainer.engine.optimizer import build_optimizer


def train_plainly(
    steps: int, optimizer_name: str = "adamw"
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms before clipping and final weights of whole global batches without dropout."""
    config = make_config("none", 0, optimizer=optimizer_name)
    model = ToyModel().eval()
    optimizer = build_optimizer(model, config.optimizer)
    losses, norms = [], []
    for step in range(steps):
        batch = global_batch(step)
        loss = model(batch) / int((labels_of(batch) != -100).sum())
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.gradient_clipping)))
        for group in optimizer.param_groups:
            group["lr"] = 3e-2 / (1 + step)
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {name: parameter.detach() for name, parameter in model.named_parameters()}
