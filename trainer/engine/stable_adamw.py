"""StableAdamW: AdamW whose step is clipped per parameter (Wortsman et al. 2023, arXiv 2304.13013, algorithm 2).

Where a gradient is larger than its running mean square predicts, rms = sqrt(mean(g^2 / max(v, eps^2))) of the
parameter is above 1, and the learning rate of this parameter is divided by it in this step. Decoupled weight decay uses
the divided rate too, and the betas are debiased: `exp_avg` and `exp_avg_sq` need no correction afterwards (optimi;
ModernBERT, src/optimizer.py).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from trainer.distributed.process_group import all_reduce_sum
from trainer.engine.fragments import Fragment, Partition


class StableAdamW(torch.optim.Optimizer):
    """Clip by the mean over the whole parameter, on any number of ranks that hold parts of it.

    Each rank sums over its fragments, and one all-reduce of a float per parameter adds the sums. Call `attach` before
    the first step.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    def attach(self, partition: Partition) -> None:
        """Set what the tensors of the groups hold."""
        self._sizes = torch.tensor([math.prod(shape) for shape in partition.shapes.values()], dtype=torch.float32)
        self._shared_by = partition.shared_by
        numbers = {name: number for number, name in enumerate(partition.shapes)}
        # With many ranks the tensor of a small group is nothing but padding on the last ones.
        self._fragments: dict[torch.Tensor, list[tuple[int, Fragment]]] = {t: [] for t in partition.tensors}
        for fragment in partition.fragments:
            self._fragments[fragment.held_in].append((numbers[fragment.name], fragment))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the tensors that have a gradient; all ranks together where they share the parameters."""
        assert closure is None, "the gradients are there"
        updated = [(group, t) for group in self.param_groups for t in group["params"] if t.grad is not None]
        if not updated:
            return
        sums = torch.zeros_like(self._sizes, device=updated[0][1].device)
        for group, tensor in updated:
            self._update_moments(group, tensor, sums)
        if self._shared_by is not None:
            sums = all_reduce_sum(sums, self._shared_by).to(sums.device)
        divisors = (sums / self._sizes.to(sums.device)).sqrt_().clamp_(min=1.0)  # (parameters,)
        for group, tensor in updated:
            self._update_weights(group, tensor, divisors)

    def _update_moments(self, group: dict[str, Any], tensor: torch.Tensor, sums: torch.Tensor) -> None:
        """Update both moments, and write the sums of g^2 / max(v, eps^2) of this tensor's fragments."""
        state, gradient = self.state[tensor], tensor.grad
        assert gradient is not None
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(tensor), torch.zeros_like(tensor)
        state["step"] += 1
        beta1, beta2 = (_debiased(beta, int(state["step"])) for beta in group["betas"])
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        for number, fragment in self._fragments[tensor]:
            mean_squares = fragment.range_of(state["exp_avg_sq"]).clamp(min=group["eps"] ** 2)
            sums[number] = (fragment.range_of(gradient).square() / mean_squares).sum()

    def _update_weights(self, group: dict[str, Any], tensor: torch.Tensor, divisors: torch.Tensor) -> None:
        state = self.state[tensor]
        for number, fragment in self._fragments[tensor]:
            rate = group["lr"] / divisors[number]
            update = fragment.range_of(state["exp_avg_sq"]).sqrt().add_(group["eps"])
            torch.div(fragment.range_of(state["exp_avg"]), update, out=update)
            weight = fragment.range_of(tensor)
            weight.mul_(1 - rate * group["weight_decay"]).sub_(update.mul_(rate))


def _debiased(beta: float, step: int) -> float:
    """The decay rate of a running mean that needs no bias correction: 0 in step 1, `beta` in the long run."""
    return beta * (1 - beta ** (step - 1)) / (1 - beta**step)
