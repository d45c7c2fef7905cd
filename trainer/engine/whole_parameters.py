"""Functions of whole parameters where ZeRO divides them: each is computed on one rank, its owner.

An optimizer whose update is not element by element, such as Muon, has the method `attach` and in it makes a
`WholeParameters` of the partition that it is given:

    def attach(self, partition: Partition) -> None:
        self._whole = WholeParameters(partition, partition.hidden_matrices)

    def step(self, closure=None):
        ...
        for fragment, update in self._whole.apply(tensor, momentum, function):
            fragment.range_of(tensor).sub_(update, alpha=rate)

If one rank has all of a parameter (most matrices at ZeRO 1 and 2), nothing is sent. Otherwise the fragments go to the
owner, and the owner's results go back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from trainer.distributed.process_group import Ranks, exchange, gather_objects
from trainer.engine.fragments import Fragment, Partition

Bounds = Mapping[str, tuple[int, int]]
"""The elements [start, stop) of each parameter on a rank."""


class WholeParameters:
    """The parameters `names` of a partition, and who owns each; all ranks make it together."""

    def __init__(self, partition: Partition, names: Collection[str], dtype: torch.dtype = torch.float32) -> None:
        """`dtype` is that of function arguments and of messages between ranks."""
        fragments = [fragment for fragment in partition.fragments if fragment.name in names]
        mine = [[fragment for fragment in fragments if fragment.held_in is t] for t in partition.tensors]
        bounds = [{fragment.name: (fragment.start, fragment.stop) for fragment in each} for each in mine]
        ranks = partition.shared_by
        by_rank = [bounds] if ranks is None else gather_objects(bounds, ranks)
        loads = [0] * len(by_rank)
        self._exchanges = {}
        for number, tensor in enumerate(partition.tensors):
            of_ranks = [each[number] for each in by_rank]
            owners = choose_owners(of_ranks, partition.shapes, loads)
            self._exchanges[tensor] = _Exchange(of_ranks, owners, dtype, ranks)
        self._fragments = dict(zip(partition.tensors, mine, strict=True))
        self._shapes, self._device, self._dtype = partition.shapes, partition.device, dtype

    def apply(
        self,
        tensor: torch.Tensor,
        values: torch.Tensor | Callable[[Fragment], torch.Tensor],
        function: Callable[[str, torch.Tensor], torch.Tensor],
    ) -> list[tuple[Fragment, torch.Tensor]]:
        """Return this rank's elements of `function` for each of its fragments in `tensor`; all ranks together.

        Args:
            tensor: one of the tensors in the groups of the optimizer.
            values: the argument, of the tensor's shape, or a function of the fragment that gives its elements.
            function: from name and whole argument to the whole result, both of the parameter's shape; each parameter
                is computed on its owner alone.

        Returns:
            (fragment, its elements (stop - start,) of the result in the dtype of this object), empty ones left out.

        Raises:
            ValueError: a result has another number of elements than its parameter.
        """
        fragments = self._fragments[tensor]
        elements = {
            fragment.name: (fragment.range_of(values) if torch.is_tensor(values) else values(fragment)).to(
                self._device, self._dtype
            )
            for fragment in fragments
        }
        exchange_of_tensor = self._exchanges[tensor]
        whole = exchange_of_tensor.gather(elements)
        results = {name: self._result(name, each, function) for name, each in whole.items()}
        found = exchange_of_tensor.scatter(results)
        return [(fragment, found[fragment.name]) for fragment in fragments if fragment.start < fragment.stop]

    def _result(
        self, name: str, whole: torch.Tensor, function: Callable[[str, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return the function's result, 1-D, in the dtype that other ranks expect."""
        result = function(name, whole.view(self._shapes[name]))
        if result.numel() != whole.numel():
            raise ValueError(f"the result for {name} has the shape {(*result.shape,)}, not {self._shapes[name]}")
        return result.reshape(-1).to(self._dtype)


def choose_owners(bounds: Sequence[Bounds], shapes: Mapping[str, Sequence[int]], loads: list[int]) -> dict[str, int]:
    """Return the owner of each parameter by name: of the ranks that have elements, the one with the least work so far.

    The work is that of a matrix product. `bounds` are those of every rank; `loads` counts the work of each, and grows.
    """
    owners = {}
    for name in dict.fromkeys(name for of_rank in bounds for name in of_rank):
        holders = [rank for rank, of_rank in enumerate(bounds) if _size(of_rank, name)]
        owners[name] = min(holders, key=loads.__getitem__)
        loads[owners[name]] += math.prod(shapes[name]) * min(shapes[name], default=1)
    return owners


def _size(bounds: Bounds, name: str) -> int:
    start, stop = bounds.get(name, (0, 0))
    return stop - start


class _Exchange:
    """Bring the fragments of each parameter to its owner, and the owner's results back to where the fragments are."""

    def __init__(
        self, bounds: Sequence[Bounds], owners: Mapping[str, int], dtype: torch.dtype, ranks: Ranks | None
    ) -> None:
        """`bounds` are those of every rank; without `ranks`, those of this rank alone."""
        self._bounds, self._dtype, self._ranks = bounds, dtype, ranks
        self._rank = 0 if ranks is None else ranks.rank
        self._owned_by = [[name for name, owner in owners.items() if owner == rank] for rank in range(len(bounds))]
        self._is_split = any(sum(_size(of_rank, name) > 0 for of_rank in bounds) > 1 for name in owners)

    def gather(self, fragments: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the whole parameters that this rank owns, 1-D, from the elements on all ranks."""
        sent = [[fragments[name] for name, _, _ in self._between(self._rank, owner)] for owner in self._all_ranks]
        collected: dict[str, list[torch.Tensor]] = {}
        for rank, received in enumerate(self._exchanged(sent, to_owners=True)):
            for (name, _, _), fragment in zip(self._between(rank, self._rank), received, strict=True):
                collected.setdefault(name, []).append(fragment)  # fragments of a parameter follow the order of ranks
        return {name: torch.cat(each) if len(each) > 1 else each[0] for name, each in collected.items()}

    def scatter(self, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return this rank's elements of each parameter, from the whole parameters on their owners."""
        sent = [
            [whole[name][start:stop] for name, start, stop in self._between(rank, self._rank)]
            for rank in self._all_ranks
        ]
        return {
            name: fragment
            for owner, received in enumerate(self._exchanged(sent, to_owners=False))
            for (name, _, _), fragment in zip(self._between(self._rank, owner), received, strict=True)
        }

    @property
    def _all_ranks(self) -> range:
        return range(len(self._bounds))

    def _between(self, holder: int, owner: int) -> list[tuple[str, int, int]]:
        """Return name, start and stop of a rank's elements of an owner's parameters, in the same order everywhere."""
        bounds = self._bounds[holder]
        return [(name, *bounds[name]) for name in self._owned_by[owner] if _size(bounds, name)]

    def _exchanged(self, sent: list[list[torch.Tensor]], to_owners: bool) -> list[list[torch.Tensor]]:
        """Return the tensors that each rank sends here; a rank's message to itself is not copied."""
        if self._ranks is None or not self._is_split:
            return [sent[rank] if rank == self._rank else [] for rank in self._all_ranks]
        nothing = torch.empty(0, dtype=self._dtype)
        bundles, sizes = [], []
        for rank in self._all_ranks:
            is_other = rank != self._rank
            expected = self._between(rank, self._rank) if to_owners else self._between(self._rank, rank)
            sizes.append([stop - start for _, start, stop in expected] if is_other else [])
            bundles.append(torch.cat(sent[rank]) if is_other and sent[rank] else nothing)
        received = exchange(bundles, [sum(each) for each in sizes], self._ranks)
        return [
            list(received[rank].split(sizes[rank])) if rank != self._rank else sent[rank] for rank in self._all_ranks
        ]
