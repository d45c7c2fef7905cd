"""Load of the machine of rank 0, under the names of MLflow's system metrics, so that the pages of MLflow show them.

The metrics are read at each log line, so there is no thread, and every value has a step. MLflow's own monitor needs
MLflow's global state and a server that answers.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil
import torch

MEGABYTE = 1e6


class SystemMetrics:
    """Reads the metrics; shares of time are those since the last reading."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        """`folder` is on the disk whose free space is reported."""
        self._folder, self._device = folder, device
        self._network = psutil.net_io_counters()
        psutil.cpu_percent()  # the first reading is from here on

    def read(self) -> dict[str, float]:
        """Return the present metrics; takes less than a millisecond on the CPU."""
        memory, network = psutil.virtual_memory(), psutil.net_io_counters()
        metrics = {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": (memory.total - memory.available) / MEGABYTE,
            "system_memory_usage_percentage": memory.percent,
        }
        with contextlib.suppress(OSError):  # the folder was removed; the next save creates it again
            disk = psutil.disk_usage(str(self._folder))
            metrics |= {"disk_usage_percentage": disk.percent, "disk_available_megabytes": disk.free / MEGABYTE}
        if network is not None and self._network is not None:  # None in a container without interfaces
            received = network.bytes_recv - self._network.bytes_recv
            sent = network.bytes_sent - self._network.bytes_sent
            metrics |= {"network_receive_megabytes": received / MEGABYTE, "network_transmit_megabytes": sent / MEGABYTE}
        if self._device.type == "cuda":
            for read in (_gpu_memory, _gpu_utilization, _gpu_power):
                # nvidia-ml-py is not a dependency; on MIG slices, vGPUs and Jetson NVML refuses, by errors of its own.
                with contextlib.suppress(Exception):
                    metrics |= read(self._device)
        return {f"system/{name}": float(value) for name, value in metrics.items()}


def _gpu_memory(device: torch.device) -> dict[str, float]:
    free, total = torch.cuda.mem_get_info(device)
    return {
        "gpu_0_memory_usage_megabytes": (total - free) / MEGABYTE,
        "gpu_0_memory_usage_percentage": 100.0 * (total - free) / total,
    }


def _gpu_utilization(device: torch.device) -> dict[str, float]:
    return {"gpu_0_utilization_percentage": float(torch.cuda.utilization(device))}


def _gpu_power(device: torch.device) -> dict[str, float]:
    return {"gpu_0_power_usage_watts": torch.cuda.power_draw(device) / 1000.0}
