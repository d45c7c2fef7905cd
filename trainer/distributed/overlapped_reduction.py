"""All-reduce of gradients in buckets that are sent while the backward still computes the others.

DeepSpeed's BF16_Optimizer (ZeRO 1 in bf16) reduces after the backward. Its stage 2 overlaps on CUDA, but it reduces
after every micro-batch and synchronizes the device each time, and on the CPU it does not overlap at all (deepspeed
0.19.8, stage_1_and_2.py: average_tensor, independent_gradient_partition_epilogue). Here every bucket is one
asynchronous all-reduce of torch.distributed, with NCCL and with gloo alike, and only after a step's last micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed
from torch import nn


@dataclass
class Bucket:
    """Neighboring parameters whose gradients are adjacent in one flat buffer."""

    gradients: torch.Tensor
    """(n,): a slice of the flat buffer."""
    parameters: list[nn.Parameter]
    missing: int = 0
    """Parameters whose gradient the current backward has not computed yet."""
    sent: torch.Tensor | None = field(default=None, repr=False)
    work: Any = field(default=None, repr=False)


class OverlappedReduction:
    """Averaging of gradients over ranks between `begin` and `finish`, around the last backward of a step."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        dtype: torch.dtype,
        group: torch.distributed.ProcessGroup | None,
        predivide: float = 1.0,
    ) -> None:
        """Register a hook on every parameter, after those that write its gradient into the flat buffer.

        Args:
            buckets: in the order in which a backward completes them; the same on all ranks.
            dtype: of the gradients on the wire.
            predivide: divides the gradients before the sum; the world size over it divides the sum.
        """
        self._buckets, self._dtype, self._group = buckets, dtype, group
        self._predivide = predivide
        self._postdivide = torch.distributed.get_world_size(group) / predivide
        self._is_active = False
        self._num_started = 0
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, bucket=bucket: self._arrived(bucket))
            for bucket in buckets
            for parameter in bucket.parameters
        ]

    def begin(self) -> None:
        """Start the reduction; call it before the last backward of a step."""
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
        self._is_active, self._num_started = True, 0

    def finish(self) -> None:
        """Reduce the remaining buckets and store the mean over ranks in the flat buffers; call it after the backward.

        With NCCL the device waits for the reduction and the host does not.
        """
        self._is_active = False
        while self._num_started < len(self._buckets):  # a parameter that the loss does not depend on
            self._start()
        for bucket in self._buckets:
            assert bucket.sent is not None
            bucket.work.wait()
            if self._postdivide != 1.0:
                bucket.sent.mul_(1.0 / self._postdivide)
            if bucket.sent is not bucket.gradients:
                bucket.gradients.copy_(bucket.sent)
            bucket.sent = bucket.work = None

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
        bucket.sent = bucket.gradients.to(self._dtype)
        if self._predivide != 1.0:
            bucket.sent.mul_(1.0 / self._predivide)
        bucket.work = torch.distributed.all_reduce(bucket.sent, group=self._group, async_op=True)
        self._num_started += 1


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
                buckets.append(Bucket(flat[start:stop], held))
                stop, held = start, []
            held.append(parameter)
            start -= parameter.numel()
        if held:
            buckets.append(Bucket(flat[start:stop], held))
    return sorted(buckets, key=lambda bucket: -min(number_of[parameter] for parameter in bucket.parameters))
