"""A command with all the processes that it leads to: seconds, CPU seconds, and the memory of the largest of them."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def run_contained(
    command: Sequence[str], folder: Path, cores: Sequence[int], environment: dict[str, str] | None = None
) -> dict[str, float]:
    """Run the command in the folder on these cores; its output is thrown away, and a failure ends this process.

    It is started from a small process of its own, since Linux counts what the starting process held as memory of the
    started one. Processes that outlive the command (the server that workers are forked from, for a moment) count too.
    """
    order = json.dumps([list(command), str(folder), list(cores), environment])
    done = subprocess.run([sys.executable, "-I", __file__], input=order, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def _main() -> None:
    command, folder, cores, environment = json.load(sys.stdin)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    load = os.getloadavg()[0]
    with tempfile.TemporaryFile("w+") as errors:
        started_at = time.perf_counter()
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        _, status, usage = os.wait4(process.pid, 0)
        elapsed_seconds = time.perf_counter() - started_at
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            printed = errors.read()[-4000:]
            sys.exit(f"{' '.join(command)[:300]} failed with status {process.returncode}:\n{printed}")
    usages = [usage, *_wait_for_children()]
    figures = {
        "seconds": elapsed_seconds,
        "cpu_seconds": sum(one.ru_utime + one.ru_stime for one in usages),
        "peak_mb": max(one.ru_maxrss for one in usages) * 1024 / 1e6,
        "load_before": load,
    }
    print(json.dumps(figures))


def _wait_for_children() -> list[resource.struct_rusage]:
    """What every child used, those that Linux gave to this process included."""
    usages = []
    while True:
        try:
            usages.append(os.wait3(0)[2])
        except ChildProcessError:
            return usages


if __name__ == "__main__":
    _main()
