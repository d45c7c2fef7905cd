"""Micro-batches on the device: each is copied on a separate stream while the device computes the previous one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

import torch

from trainer.data.batch import TENSOR_NAMES, Batch


def on_device(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield the micro-batches on `device` in order; on CUDA the copy of the next one starts before one is yielded.

    With pinned memory (`Loader(pin_memory=True)`) neither host nor device waits for a copy that is complete in time.
    """
    if device.type == "cuda":
        yield from _copied_ahead(batches, device)
    else:
        for batch in batches:
            yield batch.to(device)


def _copied_ahead(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    coming: tuple[Batch, torch.cuda.Event] | None = None
    for batch in batches:
        following = _start_copy(batch, device)
        if coming is not None:
            yield _arrived(*coming, device)
        coming = following
    if coming is not None:
        yield _arrived(*coming, device)


def _start_copy(batch: Batch, device: torch.device) -> tuple[Batch, torch.cuda.Event]:
    """Return the batch on the device, and the event that completes its copy."""
    stream, copied = _copy_stream(device), torch.cuda.Event()
    with torch.cuda.stream(stream):
        on_its_way = batch.to(device, non_blocking=True)
        copied.record(stream)
    return on_its_way, copied


def _arrived(batch: Batch, copied: torch.cuda.Event, device: torch.device) -> Batch:
    """Return the batch for work that is queued from now on."""
    computing = torch.cuda.current_stream(device)
    computing.wait_event(copied)
    for name in TENSOR_NAMES:
        # Allocated on the other stream: a later copy must not reuse its memory before this stream is done.
        getattr(batch, name).record_stream(computing)
    return batch


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
