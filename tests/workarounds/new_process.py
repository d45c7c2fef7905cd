"""Processes of their own, for what a library does to a whole process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]


SLEEPER = "import os, sys, time\nopen(sys.argv[-1], 'w').write(str(os.getpid()) + '.')\ntime.sleep(600)\n"
"""A script that writes its process number and a full stop into a file and sleeps."""


def number_of_sleeper(file: Path, seconds: float = 300.0) -> int:
    """The process number that `SLEEPER` writes; waits until it is there."""
    deadline = time.monotonic() + seconds
    while not (file.is_file() and file.read_text().endswith(".")):
        assert time.monotonic() < deadline, f"nothing has begun within {seconds} seconds"
        time.sleep(0.2)
    return int(file.read_text().removesuffix("."))


def run_python(code: str, *arguments: str, timeout: int = 300, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in the repository's root and wait for its end."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


def still_runs(process: int) -> bool:
    """Whether there is such a process, and not what is left of one that nobody has waited for."""
    return psutil.pid_exists(process) and psutil.Process(process).status() != psutil.STATUS_ZOMBIE
