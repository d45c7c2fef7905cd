"""The figures of the machine beside a run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trainer.tracking.system_metrics import SystemMetrics


def test_a_folder_that_was_removed_costs_its_own_figures_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    metrics = SystemMetrics(tmp_path / "run", torch.device("cpu"))
    there = metrics.read()
    (tmp_path / "run").rmdir()
    assert there.keys() - metrics.read().keys() == {"system/disk_usage_percentage", "system/disk_available_megabytes"}


class NVMLError(Exception):
    """As pynvml has it: no RuntimeError."""


class FakeNvml:
    """The part of pynvml that torch calls; one function of it raises."""

    NVMLError_DriverNotLoaded = type("NVMLError_DriverNotLoaded", (NVMLError,), {})

    def __init__(self, broken: str) -> None:
        self.broken = broken

    def __getattr__(self, name: str) -> Callable[..., object]:
        def call(*_: object) -> object:
            if name == self.broken:
                raise NVMLError("Not Supported")
            return SimpleNamespace(gpu=37) if name == "nvmlDeviceGetUtilizationRates" else 250_000

        return call


LOAD, POWER = "system/gpu_0_utilization_percentage", "system/gpu_0_power_usage_watts"


@pytest.mark.parametrize(
    ("broken", "left"),
    [
        ("nothing", {LOAD: 37.0, POWER: 250.0}),
        ("nvmlDeviceGetUtilizationRates", {POWER: 250.0}),  # a MIG slice
        ("nvmlDeviceGetPowerUsage", {LOAD: 37.0}),  # a vGPU
        ("nvmlDeviceGetHandleByIndex", {}),
        ("nvmlInit", {}),  # Jetson
    ],
)
def test_a_figure_that_nvml_refuses_costs_no_other(
    broken: str, left: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeNvml(broken)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "pynvml", fake, raising=False)
    monkeypatch.setattr(torch.cuda, "_HAS_PYNVML", True)
    monkeypatch.setattr(torch.cuda, "_get_nvml_device_index", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1_000_000, 4_000_000))
    metrics = SystemMetrics(tmp_path, torch.device("cuda", 0)).read()
    assert {name: value for name, value in metrics.items() if name in (LOAD, POWER)} == left
    assert metrics["system/gpu_0_memory_usage_megabytes"] == 3.0 and "system/cpu_utilization_percentage" in metrics


def test_a_driver_that_refuses_to_report_its_memory_costs_those_figures_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(device: object) -> tuple[int, int]:
        raise NVMLError("Not Supported")

    monkeypatch.setattr(torch.cuda, "mem_get_info", refuse)
    metrics = SystemMetrics(tmp_path, torch.device("cuda", 0)).read()
    assert "system/cpu_utilization_percentage" in metrics
    assert not [name for name in metrics if name.startswith("system/gpu_0_memory")]
