"""Long runs that work in the idle time of others: started, watched, ended on purpose, and started again.

A run is the project's own command under the deepspeed launcher. What each start of it took is in FOLDER/starts, also
while it runs; its output is in FOLDER/logs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from data_prep.base.errors import UserError
from tests.benchmarks import reports
from tests.support.free_ports import free_port
from trainer.tracking.status import read_status

REPOSITORY = Path(__file__).resolve().parents[2]
SAMPLE_SECONDS, MOST_FAILURES = 10.0, 5


@dataclass(frozen=True)
class Leg:
    """A part of the run, from one start to its end."""

    name: str
    ranks: int
    until: float
    """Share of the steps after which it is ended."""
    end: str


KILLED, STOPPED, TOLD, FINISHED = "SIGKILL of rank 1", "SIGTERM of all ranks", "SIGTERM of the launcher", "finished"
_STATES = {KILLED: "failed", STOPPED: "stopped", TOLD: "stopped", FINISHED: "finished"}
"""State of a run after each end."""


@dataclass(frozen=True)
class Run:
    """One training of the project's own command in a folder."""

    folder: Path
    preset: str
    settings: Sequence[str]

    @property
    def output_dir(self) -> Path:
        return self.folder / "run"

    @property
    def step(self) -> int:
        status = read_status(self.output_dir)
        return 0 if status is None or status.step is None else status.step

    def command(self, ranks: int, *more: str) -> list[str]:
        launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks)]
        launcher += ["--master_port", str(free_port())]
        return [*launcher, str(REPOSITORY / "launch" / "pretrain.py"), *self.arguments(), *more]

    def arguments(self) -> list[str]:
        return ["--config", self.preset, f"output_dir={self.output_dir}", *self.settings]

    def processes(self) -> list[psutil.Process]:
        """Launchers and ranks."""
        mark = f"output_dir={self.output_dir}"
        return [process for process in psutil.process_iter(["cmdline"]) if mark in (process.info["cmdline"] or [])]

    def ranks(self) -> dict[int, psutil.Process]:
        """By rank."""
        found = dict[int, psutil.Process]()
        for process in self.processes():
            for word in process.info["cmdline"]:
                if match := re.fullmatch(r"--local_rank=(\d+)", word):
                    found[int(match[1])] = process
        return found

    def send(self, number: signal.Signals, processes: Sequence[psutil.Process]) -> None:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def curve(self, key: str) -> list[tuple[int, float]]:
        """The points of a metric by step; of a step that was taken again, the last."""
        path, found = self.output_dir / "tracking" / "points.jsonl", dict[int, float]()
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            with contextlib.suppress(json.JSONDecodeError):  # a line that is being written
                point = json.loads(line)
                if key in point.get("m", {}):
                    found[point["s"]] = point["m"][key]
        return sorted(found.items())

    def seconds_per_step(self, batch_tokens: int) -> dict[str, float] | None:
        """The median and the tenth of all seconds per step; others work on the same cores."""
        speeds = (speed for _, speed in self.curve("train/tokens_per_second"))
        times = sorted(batch_tokens / speed for speed in speeds if speed > 0)
        if not times:
            return None
        return {"fastest_tenth": round(times[len(times) // 10], 2), "median": round(times[len(times) // 2], 2)}

    def found_in_starts(self) -> list[dict[str, Any]]:
        """What each start took, in order."""
        return [reports.read(path) for path in sorted((self.folder / "starts").glob("*.json"))]


class Watch:
    """Memory and bytes of the ranks of a start, the largest so far."""

    def __init__(self) -> None:
        self.pss: dict[int, int] = {}
        self.resident: dict[int, int] = {}
        self.written: dict[int, int] = {}

    def look(self, run: Run) -> None:
        for rank, process in run.ranks().items():
            with contextlib.suppress(psutil.Error, OSError, AttributeError):
                self.pss[rank] = max(self.pss.get(rank, 0), process.memory_full_info().pss)
                status = Path(f"/proc/{process.pid}/status").read_text()
                peak = re.search(r"VmHWM:\s+(\d+) kB", status)
                self.resident[rank] = int(peak[1]) * 1024 if peak else 0
                self.written[rank] = process.io_counters().write_bytes

    def found(self) -> dict[str, Any]:
        return {
            "pss_gib": [round(self.pss[rank] / 2**30, 2) for rank in sorted(self.pss)],
            "resident_gib": [round(self.resident[rank] / 2**30, 2) for rank in sorted(self.resident)],
            "written_gib": round(sum(self.written.values()) / 2**30, 2),
        }


def start_until(run: Run, leg: Leg, target: int) -> dict[str, Any]:
    """Start until the end that the leg wants; an end of another kind is recorded, and the command repeated."""
    failures, first = list[str](), run.step
    while len(failures) < MOST_FAILURES:
        _end_leftovers(run)
        found = _start_once(run, leg, target)
        if found["ended_as_wanted"]:
            return found | {"first_step": first, "failures": failures}
        failures.append(found["cause"] or f"status {found['status']}")
        print(f"{leg.name}: {failures[-1]}", flush=True)
        if run.step > first:
            first, failures = run.step, failures[-1:]
    raise UserError(
        f"{leg.name}: {len(failures)} starts came no further: {failures[-1]}",
        fix=f"read the log in {run.folder}/logs",
        code="no-progress",
    )


def environment() -> dict[str, str]:
    """Of every command: one thread, no GPU, no network, this checkout."""
    own = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}
    return os.environ | own


def _start_once(run: Run, leg: Leg, target: int) -> dict[str, Any]:
    logs = run.folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    number, before, started_at = len(list(logs.iterdir())), run.step, time.time()
    watch, struck_at, struck_step = Watch(), None, None
    path = logs / f"{number:03d} {leg.name}.log"
    with path.open("wb") as log:
        process = subprocess.Popen(
            run.command(leg.ranks), cwd=run.folder, env=environment(), stdout=log, stderr=subprocess.STDOUT
        )
        while process.poll() is None or run.processes():
            time.sleep(SAMPLE_SECONDS if run.step + 1 < target else 0.2)
            watch.look(run)
            seen = {"leg": leg.name, "ranks": leg.ranks, "from": before, "to": run.step, **watch.found()}
            reports.write(run.folder / "starts" / f"{number:03d}.json", seen)
            status = read_status(run.output_dir)
            is_running = status is not None and status.state == "running" and status.written_at > started_at
            if is_running and leg.end != FINISHED and struck_at is None and run.step >= target and run.ranks():
                struck_at, struck_step = time.monotonic(), run.step
                _strike(run, leg)
    status = read_status(run.output_dir)
    is_struck = struck_at is not None or leg.end == FINISHED
    resumed = re.findall(r"resuming after step (\d+)", path.read_text(errors="replace"))
    return {
        **watch.found(),
        "ranks": leg.ranks,
        "end": leg.end,
        "status": process.returncode,
        "state": status and status.state,
        "cause": status and status.cause,
        "resumed_after": int(resumed[0]) if resumed else None,
        "ended_at_step": struck_step if struck_step is not None else run.step,
        "seconds_to_end": None if struck_at is None else round(time.monotonic() - struck_at, 1),
        "ended_as_wanted": is_struck and status is not None and status.state == _STATES[leg.end],
    }


def _strike(run: Run, leg: Leg) -> None:
    print(f"{time.strftime('%H:%M:%S')} {leg.end} after step {run.step}", flush=True)
    if leg.end == KILLED:
        ranks = run.ranks()
        run.send(signal.SIGKILL, [ranks[max(ranks)]])
    elif leg.end == STOPPED:
        run.send(signal.SIGTERM, list(run.ranks().values()))
    else:
        launchers = [each for each in run.processes() if "deepspeed.launcher.runner" in each.info["cmdline"]]
        run.send(signal.SIGTERM, launchers)


def _end_leftovers(run: Run) -> None:
    """End what an earlier start of this script left running; it saves first."""
    while left := run.processes():
        print(f"{time.strftime('%H:%M:%S')} ending {len(left)} processes of an earlier start", flush=True)
        run.send(signal.SIGTERM, list(run.ranks().values()) or left)
        psutil.wait_procs(left, timeout=3600)
