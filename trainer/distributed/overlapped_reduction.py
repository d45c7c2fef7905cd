"""Averaging of gradients in buckets that are sent while the backward still computes the others.

DeepSpeed's BF16_Optimizer (ZeRO 1 in bf16) reduces after the backward. Its stage 2 overlaps on CUDA, but it reduces
after every micro-batch and synchronizes the device each time, and on the CPU it does not overlap at all (deepspeed
0.19.8, stage_1_and_2.py: average_tensor, independent_gradient_partition_epilogue). Here buckets are averaged by
asynchronous collectives (`gradient_exchange.py`), with NCCL and with gloo alike, and only after a step's last
micro-batch. When a bucket starts, earlier buckets take their next step, so few buckets are in memory at a time, and all
ranks start the same collectives in the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from trainer.distributed.gradient_exchange import Route, average


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
