"""The figures of the machine beside a run."""

from __future__ import annotations

from pathlib import Path

import torch

from trainer.tracking.system_metrics import SystemMetrics


def test_a_folder_that_was_removed_costs_its_own_figures_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    metrics = SystemMetrics(tmp_path / "run", torch.device("cpu"))
    there = metrics.read()
    (tmp_path / "run").rmdir()
    assert there.keys() - metrics.read().keys() == {"system/disk_usage_percentage", "system/disk_available_megabytes"}
