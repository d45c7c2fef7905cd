"""Where the time of a training step goes, by operation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


class Operation(NamedTuple):
    """What one kind of operation took of the profiled steps, without the operations that it called itself."""

    name: str
    calls: int
    milliseconds: float
    share: float


def profile_steps(take_steps: Callable[[], None], device: torch.device) -> profile:
    """Run `take_steps` under torch's profiler, which slows the host but not the device."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(activities=activities, acc_events=True)
    with profiler:
        take_steps()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return profiler


def top_operations(profiler: profile, device: torch.device, most: int = 15) -> list[Operation]:
    """The operations that took longest: kernels on CUDA, torch's operators on the CPU."""
    rows = []
    for event in profiler.key_averages():
        if device.type == "cuda":
            microseconds = event.self_device_time_total if event.device_type == DeviceType.CUDA else 0.0
        else:
            microseconds = event.self_cpu_time_total
        rows.append((event.key, event.count, microseconds / 1000.0))
    total = sum(milliseconds for _, _, milliseconds in rows) or 1.0
    rows.sort(key=lambda row: -row[2])
    return [Operation(*row, share=row[2] / total) for row in rows[:most]]


def write_profile(profiler: profile, path: str, device: torch.device) -> None:
    """A Chrome trace where the name ends in .json or .json.gz, otherwise the table of operations as text."""
    if path.endswith((".json", ".json.gz")):
        profiler.export_chrome_trace(path)
        return
    order = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    Path(path).write_text(profiler.key_averages().table(sort_by=order, row_limit=200, max_name_column_width=100))
