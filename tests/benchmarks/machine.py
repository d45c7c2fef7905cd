"""What a figure is worth: on which machine, with which versions and by which command it was measured."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any


def described(*packages: str) -> dict[str, Any]:
    """Machine, versions of the packages and of Python, command, and what else the machine was doing."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "command": " ".join(["python", *map(_without_folders, sys.argv)]),
        "load_average": os.getloadavg()[0],
    }


def peak_memory_mb() -> float:
    """The most memory that this process has had resident, in MB."""
    # Not getrusage: its peak is inherited from the process that started this one.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1000
    return 0.0


def _without_folders(argument: str) -> str:
    """An absolute path by its last part: where things lay on that machine is nobody's business."""
    option, equals, value = argument.rpartition("=")
    return option + equals + (Path(value).name if value.startswith("/") else value)


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
