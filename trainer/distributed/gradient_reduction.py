"""The mean of gradients over ranks, in buckets that are sent while the backward still computes the others.

DeepSpeed's BF16_Optimizer (ZeRO 1 in bf16) reduces after the backward. Its stage 2 overlaps on CUDA, but it reduces
after every micro-batch and synchronizes the device each time, and on the CPU it does not overlap at all (deepspeed
0.19.8, stage_1_and_2.py: average_tensor, independent_gradient_partition_epilogue). Here buckets are averaged by
asynchronous collectives, with NCCL and with gloo alike, and only after a step's last micro-batch. When a bucket starts,
earlier buckets take their next step, so few buckets are in memory at a time, and all ranks start the same collectives
in the same order.

Each rank's contribution is rounded once, and sums are in fp32 in a fixed order. An all-reduce in bf16 rounds after
every addition, which costs 2 to 7% of a gradient on 512 ranks. Here an all-to-all gives every rank the contributions to
an equal piece of a bucket, and the rank adds them in fp32 (as Megatron-LM,
megatron/core/distributed/reduce_scatter_with_fp32_accumulation.py). Then the sums go in fp32 to the ranks that own the
elements in ZeRO's partition. Contributions do not go there directly: 25 million of 335 million numbers have about
38 owners of 512 ranks, each of which would receive from all ranks at once.

On several nodes with equally many ranks, contributions are exchanged within the node, and the fp32 sums of nodes among
the ranks of one local rank. So a node with L ranks sends 4 bytes per number, as a ring of all ranks does in an
all-reduce in bf16; one exchange in bf16 among all ranks would make it 2 L bytes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import nn

from trainer.distributed.process_group import Ranks, all_reduce_sum, gather_objects


@dataclass
class Bucket:
    """Neighboring parameters whose gradients are the elements [start, stop) of a flat buffer."""

    flat: torch.Tensor
    """(n,): the whole buffer, with padding at its end."""
    start: int
    stop: int
    parameters: list[nn.Parameter]
    missing: int = 0
    """Parameters whose gradient the current backward has not computed yet."""


class OverlappedReduction:
    """Averaging of gradients over ranks between `begin` and `finish`, around the last backward of a step."""

    def __init__(self, buckets: Sequence[Bucket], dtype: torch.dtype, route: Route) -> None:
        """Register a hook on every parameter, after those that write its gradient into the flat buffer.

        Args:
            buckets: in the order in which a backward completes them; the same on all ranks.
            dtype: of the ranks' contributions on the wire.
        """
        self._buckets, self._dtype, self._route = buckets, dtype, route
        self._is_active = False
        self._num_started = 0
        self._under_way: list[Iterator[None]] = []
        device = buckets[0].flat.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, bucket=bucket: self._arrived(bucket))
            for bucket in buckets
            for parameter in bucket.parameters
        ]

    def begin(self) -> None:
        """Start the reduction; call it before the last backward of a step."""
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
        self._is_active, self._num_started, self._under_way = True, 0, []

    def finish(self) -> None:
        """Average the remaining buckets; this rank's part of each flat buffer then has the means over ranks.

        Call it after the backward. With NCCL the device waits for the reduction and the host does not.
        """
        self._is_active = False
        while self._num_started < len(self._buckets):  # a parameter that the loss does not depend on
            self._start()
        with self._beside_the_backward():
            while self._under_way:
                self._advance()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def destroy(self) -> None:
        """Remove the hooks; Python's garbage collector does not detect cycles through them."""
        for hook in self._hooks:
            hook.remove()

    def _arrived(self, bucket: Bucket) -> None:
        if not self._is_active:
            return
        bucket.missing -= 1
        # In the same order on all ranks, in any order of gradients.
        while self._num_started < len(self._buckets) and not self._buckets[self._num_started].missing:
            self._start()

    @torch.no_grad()
    def _start(self) -> None:
        bucket = self._buckets[self._num_started]
        self._num_started += 1
        with self._beside_the_backward():
            started = average(bucket.flat, bucket.start, bucket.stop, self._route, self._dtype)
            next(started)  # before others are waited for, so that the network has work
            self._advance()
            self._under_way.append(started)

    @torch.no_grad()
    def _advance(self) -> None:
        self._under_way = [bucket for bucket in self._under_way if next(bucket, self) is not self]

    @contextlib.contextmanager
    def _beside_the_backward(self) -> Iterator[None]:
        """Use a separate stream on CUDA: it waits for the gradients so far, and the backward does not wait for it."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield


def cut_into_buckets(
    groups: Sequence[tuple[Sequence[nn.Parameter], torch.Tensor]], order: Sequence[nn.Parameter], bucket_elements: int
) -> list[Bucket]:
    """Divide flat gradient buffers into buckets, in the order in which a backward completes them.

    Args:
        groups: the parameters of each flat buffer (n,), whose gradients are consecutive from 0 on.
        order: all parameters as the forward uses them; their gradients come in the reverse order.
        bucket_elements: largest number of elements of a bucket; a larger parameter is a bucket by itself.
    """
    number_of = {parameter: number for number, parameter in enumerate(order)}
    buckets: list[Bucket] = []
    for parameters, flat in groups:
        stop = sum(parameter.numel() for parameter in parameters)
        start, held = stop, list[nn.Parameter]()
        for parameter in reversed(parameters):
            if held and stop - start + parameter.numel() > bucket_elements:
                buckets.append(Bucket(flat, start, stop, held))
                stop, held = start, []
            held.append(parameter)
            start -= parameter.numel()
        if held:
            buckets.append(Bucket(flat, start, stop, held))
    return sorted(buckets, key=lambda bucket: -min(number_of[parameter] for parameter in bucket.parameters))


Group = torch.distributed.ProcessGroup | None
_ROW = 512


class Level(NamedTuple):
    """A group of ranks that exchange with each other, ordered by number."""

    group: Group
    size: int


class Route(NamedTuple):
    """The exchanges that turn a rank's contributions into sums, and bring the sums to their owners."""

    rank: int
    all_ranks: Level
    levels: tuple[Level, ...]
    """All ranks; or those of this node, then those with this local rank on all nodes."""


def open_route(ranks: Ranks, group: Group) -> Route:
    """Create the groups of this rank; `group` has all ranks, which call it together."""
    all_ranks = Level(group, ranks.world_size)
    size = ranks_per_node(ranks)
    if size == 1:
        return Route(ranks.rank, all_ranks, (all_ranks,))
    first = ranks.rank - ranks.local_rank
    neighbors = range(first, first + size), range(ranks.local_rank, ranks.world_size, size)
    groups = [torch.distributed.new_group(list(each), use_local_synchronization=True) for each in neighbors]
    levels = tuple(Level(created, len(each)) for created, each in zip(groups, neighbors, strict=True))
    return Route(ranks.rank, all_ranks, levels)


def ranks_per_node(ranks: Ranks) -> int:
    """Return how many ranks of a node exchange first; 1 with one node, or if nodes differ in ranks; a collective."""
    local_ranks = gather_objects(ranks.local_rank, ranks)
    size = max(local_ranks) + 1
    is_regular = local_ranks == [*range(size)] * (ranks.world_size // size)
    return size if is_regular and size < ranks.world_size else 1


def average(flat: torch.Tensor, start: int, stop: int, route: Route, dtype: torch.dtype) -> Iterator[None]:
    """Replace this rank's part of [start, stop) by the mean over ranks; a step of the iterator per collective.

    A step waits for the collective of the step before and starts the next one; the last step only waits.

    Args:
        flat: (n,) fp32, of which rank r owns the r-th of equal parts; elements that others own stay as they are.
        dtype: of contributions on the wire; sums travel in fp32.
    """
    world_size = route.all_ranks.size
    values = contributions(flat[start:stop], world_size, route.levels[0].size, dtype)
    for level in route.levels:
        received = torch.empty_like(values)
        work = _all_to_all(received, values, level.group)
        yield
        work.wait()
        values = received.view(level.size, -1).sum(0, dtype=torch.float32)
        del received
    part = flat.numel() // world_size
    first = max(start, route.rank * part)
    mine = flat[first : max(first, min(stop, (route.rank + 1) * part))]
    to_owners, from_pieces = sizes_to_owners(start, stop, part, route.rank, world_size)
    work = _all_to_all(mine, values[: sum(to_owners)], route.all_ranks.group, from_pieces, to_owners)
    yield
    work.wait()
    mine.div_(world_size)


def contributions(gradients: torch.Tensor, world_size: int, per_node: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the first message of this rank, (world_size * piece,): equal pieces of (n,) gradients, padded at the end.

    Pieces are in the order of the ranks that add them up, ordered by local rank and then by node: the first exchange
    is within the node.
    """
    piece = math.ceil(gradients.numel() / world_size)
    padded = gradients.new_zeros(world_size * piece, dtype=dtype)
    padded[: gradients.numel()] = gradients
    return padded.view(-1, per_node, piece).transpose(0, 1).reshape(-1)


def sizes_to_owners(start: int, stop: int, part: int, rank: int, world_size: int) -> tuple[list[int], list[int]]:
    """Return how many elements of [start, stop) a rank with the sums of its piece sends to and receives from each rank.

    `part` is the number of elements that a rank owns.
    """
    piece = math.ceil((stop - start) / world_size)
    first, last = (min(start + number * piece, stop) for number in (rank, rank + 1))
    own_first, own_last = max(start, rank * part), min(stop, (rank + 1) * part)
    return _counts(first, last, part, world_size), _counts(own_first - start, own_last - start, piece, world_size)


def _counts(first: int, last: int, size: int, num_ranks: int) -> list[int]:
    """Return how many of the elements [first, last) each rank has, if each rank has `size` elements in all."""
    counts = [0] * num_ranks
    while first < last:
        rank = first // size
        end = min(last, (rank + 1) * size)
        counts[rank] = end - first
        first = end
    return counts


def norm_of_parts(parts: Sequence[torch.Tensor], ranks: Ranks) -> torch.Tensor:
    """Return the norm, fp32 of shape (), of a gradient of which each element is in the part of one rank."""
    squares = torch.stack([_sum_of_squares(part) for part in parts])
    return all_reduce_sum(squares.sum(), ranks).sqrt().float()


def _sum_of_squares(part: torch.Tensor) -> torch.Tensor:
    """Sum in float64 over norms of few elements each: on the CPU torch adds 3 million in fp32 with an error of 1e-4."""
    rows = part[: len(part) // _ROW * _ROW].view(-1, _ROW)
    norms = [torch.linalg.vector_norm(rows, dim=1), torch.linalg.vector_norm(part[rows.numel() :]).view(1)]
    return torch.cat(norms).double().square().sum()


def _all_to_all(
    received: torch.Tensor,
    sent: torch.Tensor,
    group: Group,
    received_sizes: Sequence[int] = (),
    sent_sizes: Sequence[int] = (),
) -> Any:
    """Start an all-to-all, of bytes because of gloo; sizes are numbers of elements by rank, equal if not given."""
    received_bytes, sent_bytes = (
        [size * sent.element_size() for size in sizes] or None for sizes in (received_sizes, sent_sizes)
    )
    return torch.distributed.all_to_all_single(
        received.view(torch.uint8), sent.view(torch.uint8), received_bytes, sent_bytes, group=group, async_op=True
    )
