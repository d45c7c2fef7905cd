"""The report of a benchmark: a table, the slowest operations, and a JSON file with the conditions of each figure."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from data_prep.base.processor import this_processor
from trainer.benchmark.measurement import SpeedMeasurement
from trainer.config.run_config import RunConfig, without_secrets
from trainer.distributed.process_group import Ranks
from trainer.metrics.throughput import flops_per_position, peak_flops
from trainer.model.sizes import FLOPS_FORMULA
from trainer.objectives.pretraining import num_parameters
from trainer.tracking.run_description import describe_environment, git_revision

GIB = 1 << 30


class Operation(NamedTuple):
    """The time of one kind of operation in the profiled steps, without the operations that it called."""

    name: str
    calls: int
    milliseconds: float
    share: float


def heading_lines(config: RunConfig, stage_number: int, ranks: Ranks, engine: str, data: str) -> list[str]:
    """Return lines with the measured configuration, and the divisor of MFU."""
    training, stage = config.training, config.stages[stage_number]
    peak = peak_flops(config, ranks.device)
    mode = "compiled blocks" if training.compile else "eager"
    return [
        f"{num_parameters(config.model, config.all_objectives):,} parameters, {training.precision}, {mode}, "
        f"{engine}; {ranks.world_size} x {device_name(ranks.device)}",
        f"rows of {stage.sequence_length} tokens; {data}",
        f"MFU = {flops_per_position(config, stage) / 1e9:.4g} GFLOP per token x tokens/s / "
        + (f"{peak / 1e12:g} TFLOP/s per device" if peak else "an unknown peak (set it with --peak-tflops)"),
    ]


def table_lines(points: Sequence[SpeedMeasurement]) -> list[str]:
    """Return one line for each measured batch shape, after the headings."""
    lines = [
        f"{'micro-batch':>11}  {'accumulation':>12}  {'tokens/s':>10}  {'ms per step (p10 to p90)':>28}  {'MFU':>10}  "
        f"{'data loading':>16}  {'filled':>7}  peak memory, GiB"
    ]
    for point in points:
        times = point.step_milliseconds
        step = f"{times['median']:,.1f} ({times['p10']:,.1f} to {times['p90']:,.1f})"
        mfu = "unknown" if point.mfu is None else f"{point.mfu:.1%}"
        memory = ", ".join(f"{name} {size / GIB:.2f}" for name, size in point.peak_memory_bytes.items())
        lines.append(
            f"{point.micro_batch_tokens:>11,}  {point.accumulation_steps:>12}  {point.tokens_per_second:>10,.0f}  "
            f"{step:>28}  {mfu:>10}  {point.data_wait_share:>16.2%}  {point.filled_share:>7.2%}  {memory}"
        )
    return lines


def operation_lines(operations: Sequence[Operation]) -> list[str]:
    """Return the lines of a table of operations."""
    lines = [
        f"{operation.share:>6.1%}  {operation.milliseconds:>10.2f}  {operation.calls:>7}  {operation.name[:90]}"
        for operation in operations
    ]
    return [f"{'share':>6}  {'ms':>10}  {'calls':>7}  operation", *lines]


def report(
    config: RunConfig, stage_number: int, ranks: Ranks, engine: str, data: str, points: Sequence[SpeedMeasurement]
) -> dict[str, Any]:
    """Return the content of the JSON file, without secrets of the configuration."""
    peak = peak_flops(config, ranks.device)
    return {
        "machine": describe_machine(ranks.device) | {"ranks": ranks.world_size},
        "versions": describe_environment(),
        "git_revision": git_revision(),
        "command": " ".join(sys.argv if sys.argv[0].startswith("clozeworks ") else ["python", *sys.argv]),
        "engine": engine,
        "data": data,
        "flops_formula": FLOPS_FORMULA,
        "flops_per_position": flops_per_position(config, config.stages[stage_number]),
        "peak_flops_per_device": peak,
        "stage": stage_number,
        "config": without_secrets(config).model_dump(mode="json"),
        "measurements": [asdict(point) for point in points],
    }


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return the device, the processor with its instruction sets, and the load of the machine."""
    processor = this_processor()
    described: dict[str, Any] = {
        "device": device_name(device),
        "cpu": processor.name,
        "instruction_sets": list(processor.instruction_sets),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
    }
    if device.type == "cuda":
        described |= {
            "device_memory_bytes": torch.cuda.get_device_properties(device).total_memory,
            "cuda": torch.version.cuda,
        }
    return described


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else this_processor().name


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
    """Return the slowest operations: kernels on CUDA, torch's operators on the CPU."""
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
    """Write a Chrome trace if the name ends in .json or .json.gz, else the table of operations as text."""
    if path.endswith((".json", ".json.gz")):
        profiler.export_chrome_trace(path)
        return
    order = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    Path(path).write_text(profiler.key_averages().table(sort_by=order, row_limit=200, max_name_column_width=100))
