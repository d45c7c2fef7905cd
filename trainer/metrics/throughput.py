"""Throughput of a run, and what slows it down, measured without making any step wait.

The *work* of a rank is what waits for no other rank: fetching batches and the forward passes. (At ZeRO 3 a forward
gathers weights from the other ranks, so the slowest rank shows less clearly.) MFU divides the operations that
`trainer/model/sizes.flops_per_token` counts by the peak of the devices (Chowdhery et al. 2022, "PaLM", appendix B).
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from trainer.config.run_config import RunConfig
from trainer.config.stages import Stage
from trainer.model.sizes import flops_per_token

Batch = TypeVar("Batch")

PEAK_FLOPS = {
    "B200": 2.25e15,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "V100-PCIE": 112e12,
    "V100": 125e12,
}
"""Dense FLOP/s in bf16 or fp16 in NVIDIA's data sheets (half of the figure "with sparsity"). A device has the first
entry whose name is part of its own name, as whole words. V100 supports fp16 only."""


class WorkClock:
    """Adds up the seconds of this rank's work between two readings."""

    def __init__(self, device: torch.device) -> None:
        self._uses_events = device.type == "cuda"
        self._data_seconds = 0.0
        self._forward_seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def fetch(self, batches: Iterator[Batch]) -> Batch:
        """Return the next of `batches`."""
        started_at = time.perf_counter()
        batch = next(batches)
        self._data_seconds += time.perf_counter() - started_at
        return batch

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Measure a forward pass; on CUDA by events, which are read later, so that nothing waits for the device."""
        if self._uses_events:
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            yield
            last.record()
            self._events.append((first, last))
            return
        started_at = time.perf_counter()
        yield
        self._forward_seconds += time.perf_counter() - started_at

    def read(self) -> tuple[float, float]:
        """Return the seconds spent on (data, forward passes) since the last reading; waits for the device."""
        for first, last in self._events:
            last.synchronize()
            self._forward_seconds += first.elapsed_time(last) / 1000.0
        seconds = self._data_seconds, self._forward_seconds
        self._data_seconds, self._forward_seconds, self._events = 0.0, 0.0, []
        return seconds


@dataclass(frozen=True)
class RankWork:
    """The work of one rank in an interval: seconds on data and on forward passes, and the peak of its memory."""

    data_seconds: float
    forward_seconds: float
    peak_memory_bytes: int


@dataclass(frozen=True)
class Interval:
    """The steps between two log lines; `tokens` and `rows` are over all ranks, and `ranks` is by rank."""

    num_steps: int
    seconds: float
    tokens: int
    rows: int
    ranks: tuple[RankWork, ...]

    @property
    def seconds_a_step(self) -> float:
        return self.seconds / self.num_steps

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def slowest_rank(self) -> int:
        """Number of the rank whose work took longest."""
        return max(range(len(self.ranks)), key=lambda rank: self.work_seconds[rank])

    @property
    def work_seconds(self) -> list[float]:
        """Seconds of work per step, by rank."""
        return [(work.data_seconds + work.forward_seconds) / self.num_steps for work in self.ranks]

    def metrics(self, stage: Stage, flops_per_position: float, peak_flops: float | None) -> dict[str, float]:
        """Return the metrics by MLflow name; `peak_flops` are FLOP/s of one device, and None gives no MFU."""
        metrics = {
            "train/tokens_per_second": self.tokens_per_second,
            "train/seconds_per_step": self.seconds_a_step,
            "train/data_wait_share": min(1.0, max(work.data_seconds for work in self.ranks) / self.seconds),
            "train/slowest_rank": float(self.slowest_rank),
            "train/slowest_rank_seconds": max(self.work_seconds),
            "train/peak_memory_bytes": float(max(work.peak_memory_bytes for work in self.ranks)),
        }
        if peak_flops is not None:
            metrics["train/mfu"] = self.flops_per_device(stage, flops_per_position) / peak_flops
        return metrics

    def flops_per_device(self, stage: Stage, flops_per_position: float) -> float:
        """Return the FLOP/s that each device reached."""
        return flops_per_position * self.rows * stage.sequence_length / (self.seconds * len(self.ranks))


def slow_rank(work_seconds: Sequence[float], ratio: float) -> int | None:
    """Return the rank whose work takes over `ratio` times the median of the others; None if there is none."""
    if len(work_seconds) < 2:
        return None
    slowest = max(range(len(work_seconds)), key=lambda rank: work_seconds[rank])
    others = sorted(seconds for rank, seconds in enumerate(work_seconds) if rank != slowest)
    return slowest if work_seconds[slowest] > ratio * others[len(others) // 2] else None


def flops_per_position(config: RunConfig, stage: Stage) -> float:
    """Return the FLOPs of forward and backward per position of a row of this stage, without the user's heads."""
    return flops_per_token(
        config.model,
        stage.sequence_length,
        stage.predicted_share,
        stage.data.has_sentence_pairs,
        stage.is_causal,
    )


def peak_flops(config: RunConfig, device: torch.device) -> float | None:
    """Return the peak FLOP/s of one device: the setting, else the figure of the data sheet, else None."""
    if config.logging.peak_flops_per_device is not None or device.type != "cuda":
        return config.logging.peak_flops_per_device
    return data_sheet_flops(torch.cuda.get_device_name(device), config.training.precision)


def data_sheet_flops(device_name: str, precision: str) -> float | None:
    """Return the FLOP/s in the data sheet of a device.

    None for an unknown device, for a MIG slice, which is a part of a device, and for fp32, whose peak depends on
    settings.
    """
    if precision == "fp32" or re.search(r"\bMIG\b", device_name):
        return None
    return next((flops for name, flops in PEAK_FLOPS.items() if re.search(rf"\b{name}\b", device_name)), None)
