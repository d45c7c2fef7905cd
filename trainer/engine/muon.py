"""Muon for the matrices inside the blocks, and AdamW for everything else.

The update of a matrix is its momentum with the singular values brought near 1 by five Newton-Schulz iterations (Jordan
et al. 2024, kellerjordan.github.io/posts/muon). It is multiplied by 0.2 sqrt(max(rows, columns)), which gives it the
root mean square of AdamW's updates, so that AdamW's learning rate and weight decay carry over (Liu et al. 2025, arXiv
2502.16982, section 2.2). Matrices that are stacked in the rows of one weight (queries, keys and values; the two halves
of a gated layer) are orthogonalized one by one.

The iterations need whole matrices. Under ZeRO every parameter has one owner among the ranks that hold parts of it.
Where a rank holds all of it (most matrices at stages 1 and 2) nothing is sent; else the parts are sent to the owner in
the precision of the iterations, and its results back. Momentum stays in ZeRO's partitions, in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trainer.distributed.process_group import Ranks, exchange, gather_objects
from trainer.engine.fragments import Partition

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
        stacked: Mapping[str, int],
    ) -> None:
        """
        Args:
            dtype: precision of the Newton-Schulz iterations and of what ranks send each other.
            stacked: by the name of every weight in an orthogonal group, the number of matrices in its rows.
        """
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)
        self._momentum, self._dtype, self._stacked = momentum, dtype, stacked

    def attach(self, partition: Partition) -> None:
        """Set what the tensors of the groups hold; all ranks together where they share the parameters."""
        fragments = [fragment for fragment in partition.fragments if fragment.name in self._stacked]
        mine = [[fragment for fragment in fragments if fragment.held_in is t] for t in partition.tensors]
        held = [{fragment.name: (fragment.start, fragment.stop) for fragment in each} for each in mine]
        ranks = partition.shared_by
        held_by_rank = [held] if ranks is None else gather_objects(held, ranks)
        loads = [0] * len(held_by_rank)
        self._fragments = dict(zip(partition.tensors, mine, strict=True))
        self._exchanges = {}
        for number, tensor in enumerate(partition.tensors):
            bounds = [each[number] for each in held_by_rank]
            owners = choose_owners(bounds, partition.shapes, loads)
            self._exchanges[tensor] = MatrixExchange(bounds, owners, self._dtype, ranks)
        self._shapes, self._device = partition.shapes, partition.device

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the tensors that have a gradient; all ranks together where they share the parameters."""
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
        state, fragments, matrices = self.state[tensor], self._fragments[tensor], self._exchanges[tensor]
        if not state:
            state["momentum"] = torch.zeros_like(tensor)
        state["momentum"].lerp_(gradient, 1 - self._momentum)
        directions = {
            fragment.name: fragment.range_of(gradient)
            .lerp(fragment.range_of(state["momentum"]), self._momentum)  # Nesterov's look ahead
            .to(self._device, self._dtype)
            for fragment in fragments
        }
        whole = matrices.gather(directions)
        updates = matrices.scatter({n: orthogonalized(d.view(self._stack(n))).view(-1) for n, d in whole.items()})
        for fragment in fragments:
            if fragment.start == fragment.stop:
                continue
            _, rows, columns = self._stack(fragment.name)
            rate = group["lr"] * RMS_OF_ADAMW * math.sqrt(max(rows, columns))
            weight = fragment.range_of(tensor)
            weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(updates[fragment.name].to(weight), alpha=-rate)

    def _stack(self, name: str) -> tuple[int, int, int]:
        """Number, rows and columns of the matrices in a weight."""
        rows, columns = self._shapes[name]
        return self._stacked[name], rows // self._stacked[name], columns


def orthogonalized(matrices: torch.Tensor) -> torch.Tensor:
    """Bring the singular values of each of (n, rows, columns) to about 0.7 to 1.2; very small ones stay below."""
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).contiguous()


Bounds = Mapping[str, tuple[int, int]]
"""By parameter, the elements [start, stop) that a rank holds."""


def choose_owners(bounds: Sequence[Bounds], shapes: Mapping[str, Sequence[int]], loads: list[int]) -> dict[str, int]:
    """By name, the rank that orthogonalizes a parameter: of those that hold elements, the one with the least work so
    far.

    `bounds` are those of every rank; `loads` counts the work of each, and grows.
    """
    owners = {}
    for name in dict.fromkeys(name for held in bounds for name in held):
        holders = [rank for rank, held in enumerate(bounds) if _size(held, name)]
        owners[name] = min(holders, key=loads.__getitem__)
        loads[owners[name]] += math.prod(shapes[name]) * min(shapes[name])
    return owners


def _size(held: Bounds, name: str) -> int:
    start, stop = held.get(name, (0, 0))
    return stop - start


class MatrixExchange:
    """Bring the fragments of each parameter to its owner, and the owner's results back to where the fragments are."""

    def __init__(
        self, bounds: Sequence[Bounds], owners: Mapping[str, int], dtype: torch.dtype, ranks: Ranks | None
    ) -> None:
        """`bounds` are those of every rank, or of this one alone without `ranks`."""
        self._bounds, self._dtype, self._ranks = bounds, dtype, ranks
        self._rank = 0 if ranks is None else ranks.rank
        self._owned_by = [[name for name, owner in owners.items() if owner == rank] for rank in range(len(bounds))]
        self._is_split = any(sum(_size(held, name) > 0 for held in bounds) > 1 for name in owners)

    def gather(self, fragments: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """From this rank's elements of each parameter to the whole of those that it owns, 1-D."""
        sent = [[fragments[name] for name, _, _ in self._between(self._rank, owner)] for owner in self._all_ranks]
        collected: dict[str, list[torch.Tensor]] = {}
        for rank, received in enumerate(self._exchanged(sent, holds=False)):
            for (name, _, _), fragment in zip(self._between(rank, self._rank), received, strict=True):
                collected.setdefault(name, []).append(
                    fragment
                )  # ranks hold the fragments of a parameter in their order
        return {name: torch.cat(each) if len(each) > 1 else each[0] for name, each in collected.items()}

    def scatter(self, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """From the whole of the parameters that this rank owns to this rank's elements of each."""
        sent = [
            [whole[name][start:stop] for name, start, stop in self._between(rank, self._rank)]
            for rank in self._all_ranks
        ]
        updates = {}
        for owner, received in enumerate(self._exchanged(sent, holds=True)):
            for (name, _, _), fragment in zip(self._between(self._rank, owner), received, strict=True):
                updates[name] = fragment
        return updates

    @property
    def _all_ranks(self) -> range:
        return range(len(self._bounds))

    def _between(self, holder: int, owner: int) -> list[tuple[str, int, int]]:
        """Name, start and stop of what a rank holds of the parameters of an owner, in the same order everywhere."""
        held = self._bounds[holder]
        return [(name, *held[name]) for name in self._owned_by[owner] if _size(held, name)]

    def _exchanged(self, sent: list[list[torch.Tensor]], holds: bool) -> list[list[torch.Tensor]]:
        """By rank, the tensors that it sends here: what this rank `holds` of theirs, or they of what it owns.

        What a rank sends to itself is not copied.
        """
        if self._ranks is None or not self._is_split:
            return [sent[rank] if rank == self._rank else [] for rank in self._all_ranks]
        nothing = torch.empty(0, dtype=self._dtype)
        bundles, sizes = [], []
        for rank in self._all_ranks:
            is_other = rank != self._rank
            bounds = self._between(self._rank, rank) if holds else self._between(rank, self._rank)
            sizes.append([stop - start for _, start, stop in bounds] if is_other else [])
            bundles.append(torch.cat(sent[rank]) if is_other and sent[rank] else nothing)
        received = exchange(bundles, [sum(each) for each in sizes], self._ranks)
        return [
            list(received[rank].split(sizes[rank])) if rank != self._rank else sent[rank] for rank in self._all_ranks
        ]
