"""The methods of `trainer.engine.engine.Engine` in plain PyTorch on one rank, to compare DeepSpeed's speed with."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trainer.config.training_settings import OptimizerSettings
from trainer.distributed.memory import keep_freed_memory
from trainer.engine.optimizer import build_optimizer


class PlainEngine:
    """A model under training: weights in the precision of the run; master weights, gradients and AdamW in fp32.

    It does the same as DeepSpeed at ZeRO stage 1 on one rank, except that it does not skip steps that are not finite.
    """

    was_step_applied = True

    def __init__(
        self,
        model: nn.Module,
        settings: OptimizerSettings,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        gradient_clipping: float = 0.0,
    ) -> None:
        """Take a model with fp32 weights; `gradient_clipping` is the largest global norm, and 0 clips nothing."""
        self.module = model.to(device)
        self._masters = self.module
        if dtype != torch.float32:
            self._masters = copy.deepcopy(self.module)
            self.module.to(dtype)
        self._optimizer = build_optimizer(self._masters, settings)
        self._max_norm = gradient_clipping or math.inf
        self.device = device

    def train(self) -> None:
        self.module.train()

    def forward(self, batch: Any, **options: Any) -> Any:
        return self.module(batch, **options)

    def backward(self, loss: torch.Tensor, is_last_micro_batch: bool = True) -> None:
        """Accumulate the gradient of `loss`, shape (), in fp32."""
        loss.backward()
        if self._masters is self.module:
            return
        for weight, master in zip(self.module.parameters(), self._masters.parameters(), strict=True):
            if weight.grad is None:
                continue
            if master.grad is None:
                master.grad = weight.grad.float()
            else:
                master.grad += weight.grad
            weight.grad = None

    def step(self) -> torch.Tensor:
        """Clip, update, clear the gradients; return the global norm before clipping, shape ()."""
        norm = nn.utils.clip_grad_norm_(self._masters.parameters(), self._max_norm)
        self._optimizer.step()
        self.clear_gradients()
        if self._masters is not self.module:
            with torch.no_grad():
                torch._foreach_copy_(list(self.module.parameters()), list(self._masters.parameters()))
        return norm

    def clear_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate

    def warmup_step(self, compute_loss: Callable[[], torch.Tensor]) -> None:
        """Run one forward and backward that change nothing."""
        self.train()
        self.backward(compute_loss())
        self.clear_gradients()
        if self.device.type == "cpu":
            keep_freed_memory()

    def destroy(self) -> None:
        """Do nothing: there are no hooks or buffers to release."""
