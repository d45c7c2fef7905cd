"""What a figure is worth: on which machine, with which versions and by which command it was measured."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep.base.processor import this_processor

REPOSITORY = Path(__file__).resolve().parents[2]


def commit_of(code: Path) -> str:
    """The commit of a checkout, 7 digits, with "-modified" where its files (but results) differ; "unknown" of none."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(code), *words], capture_output=True, text=True).stdout.strip()

    changes = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!tests/benchmarks/results")
    return (git("rev-parse", "--short=7", "HEAD") or "unknown") + ("-modified" if changes else "")


def described(*packages: str, python: str = sys.executable) -> dict[str, Any]:
    """Commit, machine, versions of the packages (as `python` finds them) and of Python, command, and load average."""
    processor = this_processor()
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit_of(REPOSITORY),
        "cpu": processor.name,
        "instruction_sets": list(processor.instruction_sets),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "versions": _versions(packages, python),
        "command": " ".join(["python", *sys.argv]),
        "load_average": os.getloadavg()[0],
    }


def peak_memory_mb() -> float:
    """The most memory that this process has had resident, in MB."""
    # Not getrusage: its peak is inherited from the process that started this one.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1000
    return 0.0


def _versions(packages: Sequence[str], python: str) -> dict[str, str]:
    code = "import importlib.metadata as m, json, sys; print(json.dumps({p: m.version(p) for p in sys.argv[1:]}))"
    done = subprocess.run([python, "-c", code, *packages], check=True, stdout=subprocess.PIPE, text=True)
    versions: dict[str, str] = json.loads(done.stdout)
    return versions
