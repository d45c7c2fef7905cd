"""Muon for the matrices inside the blocks, and AdamW for everything else.

The update of a matrix is its momentum with the singular values brought near 1 by five Newton-Schulz iterations (Jordan
et al. 2024, kellerjordan.github.io/posts/muon). It is multiplied by 0.2 sqrt(max(rows, columns)), which gives it the
root mean square of AdamW's updates, so that AdamW's learning rate and weight decay carry over (Liu et al. 2025, arXiv
2502.16982, section 2.2). Matrices that are stacked in the rows of one weight (queries, keys and values; the two halves
of a gated layer) are orthogonalized one by one.

The iterations need whole matrices (`trainer/engine/whole_parameters.py`). Momentum stays in ZeRO's partitions, in fp32.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from trainer.engine.fragments import Fragment, Partition
from trainer.engine.whole_parameters import WholeParameters

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
RMS_OF_ADAMW = 0.2


class Muon(torch.optim.AdamW):
    """AdamW, except in groups with `orthogonal=True`, whose state is `momentum` alone; call `attach` first."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        momentum: float,
        dtype: torch.dtype,
    ) -> None:
        """`dtype` is the precision of the Newton-Schulz iterations and of what ranks send each other."""
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)
        self._momentum, self._dtype = momentum, dtype

    def attach(self, partition: Partition) -> None:
        """Take the partition of the parameters; all ranks together if they share parameters."""
        self._matrices = WholeParameters(partition, partition.hidden_matrices, self._dtype)
        self._shapes, self._rows = partition.shapes, partition.hidden_matrices

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the tensors that have a gradient; all ranks together if they share parameters."""
        assert closure is None, "the gradients are there"
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["orthogonal"]]
        super().step()
        self.param_groups = groups
        for group in groups:
            for tensor in group["params"] if group["orthogonal"] else ():
                if tensor.grad is not None:
                    self._update(group, tensor, tensor.grad)

    def _update(self, group: dict[str, Any], tensor: torch.Tensor, gradient: torch.Tensor) -> None:
        state = self.state[tensor]
        if not state:
            state["momentum"] = torch.zeros_like(tensor)
        momentum = state["momentum"].lerp_(gradient, 1 - self._momentum)

        def look_ahead(fragment: Fragment) -> torch.Tensor:
            """Return Nesterov's look-ahead of a fragment."""
            return fragment.range_of(gradient).lerp(fragment.range_of(momentum), self._momentum)

        for fragment, update in self._matrices.apply(tensor, look_ahead, self._direction):
            # Keys and values of grouped attention have fewer rows than columns; queries have as many, so the largest
            # side of all three is the same.
            largest_side = max(*self._rows[fragment.name], self._shapes[fragment.name][1])
            rate = group["lr"] * RMS_OF_ADAMW * math.sqrt(largest_side)
            weight = fragment.range_of(tensor)
            weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(update.to(weight), alpha=-rate)

    def _direction(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Orthogonalize each matrix; those that follow each other with equal rows in one call."""
        columns = weight.shape[1]
        alike = [(rows, len([*group])) for rows, group in itertools.groupby(self._rows[name])]
        parts = weight.split([rows * number for rows, number in alike])
        results = [
            orthogonalized(part.view(number, rows, columns)).flatten(0, 1)
            for (rows, number), part in zip(alike, parts, strict=True)
        ]
        return torch.cat(results) if len(results) > 1 else results[0]


def orthogonalized(matrices: torch.Tensor) -> torch.Tensor:
    """Bring the singular values of n matrices (n, rows, columns) to about 0.7 to 1.2; very small ones stay below."""
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).contiguous()
