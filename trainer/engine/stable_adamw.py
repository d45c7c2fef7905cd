"""StableAdamW: AdamW whose step is clipped per parameter (Wortsman et al. 2023, arXiv 2304.13013, algorithm 2).

Where a gradient is larger than its running mean square predicts, rms = sqrt(mean(g^2 / max(v, eps^2))) of the
parameter is above 1, and the learning rate of this parameter is divided by it in this step. Decoupled weight decay uses
the divided rate too, and the betas are debiased: `exp_avg` and `exp_avg_sq` need no correction afterwards (optimi;
ModernBERT, src/optimizer.py).

A step is a few `torch._foreach_*` calls over all parameters, and one sum for each: 220 operators for `bert_base`, where
one parameter at a time takes 4,177 for the same bits (tests/trainer/engine/test_stable_adamw.py counts and compares).
Two multiplications by the parameters' rates remain a kernel per parameter. A step needs two temporary float32 numbers
for each element on this rank, after the activations are freed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from trainer.distributed.process_group import all_reduce_sum
from trainer.engine.fragments import Fragment, Partition


class StableAdamW(torch.optim.Optimizer):
    """Clip by the mean over the whole parameter, on any number of ranks that have parts of it.

    Each rank sums over its fragments, and one all-reduce of a float per parameter adds the sums. Call `attach` before
    the first step.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    def attach(self, partition: Partition) -> None:
        """Take the partition of the parameters."""
        self._sizes = torch.tensor([math.prod(shape) for shape in partition.shapes.values()], dtype=torch.float32)
        self._shared_by = partition.shared_by
        numbers = {name: number for number, name in enumerate(partition.shapes)}
        # With many ranks the tensor of a small group is nothing but padding on the last ones.
        held: dict[torch.Tensor, list[Fragment]] = {tensor: [] for tensor in partition.tensors}
        for fragment in partition.fragments:
            held[fragment.held_in].append(fragment)
        self._layouts = {tensor: _layout_of(tensor, fragments, numbers) for tensor, fragments in held.items()}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the tensors that have a gradient; all ranks together if they share parameters."""
        assert closure is None, "the gradients are there"
        updated = [
            (group, tensors)
            for group in self.param_groups
            if (tensors := [tensor for tensor in group["params"] if tensor.grad is not None])
        ]
        if not updated:
            return
        device = updated[0][1][0].device
        self._sizes = self._sizes.to(device)
        sums = [torch.zeros((), device=device)] * len(self._sizes)
        for group, tensors in updated:
            self._update_moments(group, tensors)
            self._sum(group, tensors, sums)
        total = torch.stack(sums)
        if self._shared_by is not None:
            total = all_reduce_sum(total, self._shared_by).to(device)
        divisors = (total / self._sizes).sqrt_().clamp_(min=1.0)  # (parameters,)
        for group, tensors in updated:
            self._update_weights(group, tensors, divisors)

    def _update_moments(self, group: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            if not (state := self.state[tensor]):
                state["step"] = torch.zeros(())
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(tensor), torch.zeros_like(tensor)
        steps = self._states("step", tensors)
        torch._foreach_add_(steps, 1)
        numbers = torch.stack(steps).tolist()
        beta1, beta2 = ([_debiased(beta, int(number)) for number in numbers] for beta in group["betas"])
        gradients = _gradients(tensors)
        squares = self._states("exp_avg_sq", tensors)
        torch._foreach_lerp_(self._states("exp_avg", tensors), gradients, [1 - beta for beta in beta1])
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, [1 - beta for beta in beta2])

    def _sum(self, group: dict[str, Any], tensors: list[torch.Tensor], sums: list[torch.Tensor]) -> None:
        """Store the sum of g^2 / max(v, eps^2) over this rank's elements of a parameter at the parameter's number."""
        gradients = self._parts(tensors, _gradients(tensors))
        if not gradients:
            return
        mean_squares = torch._foreach_clamp_min(
            self._parts(tensors, self._states("exp_avg_sq", tensors)), group["eps"] ** 2
        )
        ratios = torch._foreach_mul(gradients, gradients)
        torch._foreach_div_(ratios, mean_squares)
        for number, ratio in zip(self._numbers(tensors), ratios, strict=True):
            sums[number] = ratio.sum()

    def _update_weights(self, group: dict[str, Any], tensors: list[torch.Tensor], divisors: torch.Tensor) -> None:
        weights = self._parts(tensors, tensors)
        if not weights:
            return
        rates = group["lr"] / divisors
        of_numbers, shrinks = rates.unbind(), (1 - rates * group["weight_decay"]).unbind()
        numbers = self._numbers(tensors)
        roots = torch._foreach_sqrt(self._parts(tensors, self._states("exp_avg_sq", tensors)))
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(self._parts(tensors, self._states("exp_avg", tensors)), roots)
        torch._foreach_mul_(updates, [of_numbers[number] for number in numbers])
        if group["weight_decay"]:  # else the factor is 1
            torch._foreach_mul_(weights, [shrinks[number] for number in numbers])
        torch._foreach_sub_(weights, updates)

    def _states(self, name: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [self.state[tensor][name] for tensor in tensors]

    def _numbers(self, tensors: list[torch.Tensor]) -> list[int]:
        """Return the numbers of the parameters with elements in these tensors, in the order of `_parts`."""
        return [number for tensor in tensors for number in self._layouts[tensor].numbers]

    def _parts(self, tensors: list[torch.Tensor], values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the fragments' ranges of tensors that have the shapes of `tensors`."""
        return [
            section
            for tensor, value in zip(tensors, values, strict=True)
            for section in self._layouts[tensor].of(value)
        ]


class _Layout(NamedTuple):
    """The division of a flattened tensor into fragments, and the gaps between and behind them."""

    sizes: list[int]
    """Elements of the sections, which cover the tensor."""
    kept: list[int]
    """Indices of the sections that are fragments."""
    numbers: list[int]
    """Numbers of the fragments' parameters."""

    def of(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        if len(self.sizes) == len(self.kept) == 1:
            return [tensor]
        if not self.kept:
            return []
        sections = tensor.view(-1).split(self.sizes)
        return [sections[number] for number in self.kept]


def _layout_of(tensor: torch.Tensor, fragments: Sequence[Fragment], numbers: dict[str, int]) -> _Layout:
    sizes: list[int] = []
    kept: list[int] = []
    ordered = sorted((f for f in fragments if f.start < f.stop), key=lambda fragment: fragment.offset)
    for fragment in ordered:
        sizes += [gap] if (gap := fragment.offset - sum(sizes)) else []
        kept.append(len(sizes))
        sizes.append(fragment.stop - fragment.start)
    sizes += [rest] if (rest := tensor.numel() - sum(sizes)) else []
    return _Layout(sizes, kept, [numbers[fragment.name] for fragment in ordered])


def _gradients(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.grad for tensor in tensors if tensor.grad is not None]


def _debiased(beta: float, step: int) -> float:
    """Return the decay rate of a running mean that needs no bias correction: 0 in step 1, `beta` in the long run."""
    return beta * (1 - beta ** (step - 1)) / (1 - beta**step)
