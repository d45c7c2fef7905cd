"""Starting `toy_training.py` on several ranks."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

from tests.support import fork_server
from tests.support.fork_server import Started
from tests.support.free_ports import free_port

SCRIPT = Path(__file__).with_name("toy_training.py")
ROOT = SCRIPT.parents[2]
MASTER_ADDR = "127.0.0.1"


def start_ranks(arguments: list[str], world_size: int, local_ranks: tuple[int, ...] | None = None) -> list[Started]:
    """Run `python ARGUMENTS` as the ranks of one group on this host's CPU; `local_ranks` pretends several hosts."""
    base = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": MASTER_ADDR,
        "MASTER_PORT": str(free_port()),
    }
    return [
        fork_server.start(
            arguments,
            Path.cwd(),
            base | {"RANK": str(rank), "LOCAL_RANK": str(local_ranks[rank] if local_ranks else rank)},
        )
        for rank in range(world_size)
    ]


def finish(processes: list[Started], timeout: float = 1500) -> list[tuple[int, str, str]]:
    """(exit status, stdout, stderr) of every rank."""
    try:
        outputs = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def run_jobs(folder: Path, world_size: int, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run the jobs one after another in one group of processes; rank 0's reports."""
    plan = folder / f"plan-{len(list(folder.glob('plan-*.json')))}.json"
    plan.write_text(json.dumps(jobs))
    for status, stdout, stderr in finish(start_ranks([str(SCRIPT), str(plan)], world_size)):
        assert status == 0, f"exit status {status}\n{stdout}\n{stderr}"
    return json.loads(plan.with_suffix(".out").read_text())


NORMALIZED = "tests.support.toy_optimizers:normalized_momentum"
"""An optimizer of the user's own that needs whole parameters."""
OPTIMIZERS = ("adamw", "stable_adamw", "muon", "tests.support.toy_optimizers:lion", NORMALIZED)


def precisions_of(zero_stage: int, optimizer: str) -> tuple[str, ...]:
    """Those in which `trained` stops and resumes; once will do for StableAdamW, which has AdamW's states."""
    if ":" in optimizer or optimizer == "stable_adamw":
        return ("bf16",) if zero_stage == 3 else ()
    if zero_stage == 0:
        return ("fp32",)
    return ("fp32", "bf16") if optimizer == "adamw" else ("bf16",)


def averaged_name(zero_stage: int) -> str:
    """The optimizer and precision of the run `averaged`."""
    return "muon-bf16" if zero_stage else "muon-fp32"


@functools.cache
def trained(zero_stage: int) -> tuple[Path, dict[str, dict[str, Any]]]:
    """Two ranks at one ZeRO stage: a folder of runs, and the report of each; made once for all workers.

    By optimizer and precision `OPTIMIZER-PRECISION-whole` of 4 steps, `OPTIMIZER-PRECISION-halves` of 2 steps and then
    2 more in a new engine, both with dropout; `averaged`, which evaluates the mean of all its
    checkpoints after every step; and `OPTIMIZER-plain` of 2 steps without dropout. The whole ones and
    those named plain end with a step whose loss is NaN.
    """

    def make(folder: Path) -> None:
        jobs = _jobs(zero_stage, folder)
        reports = dict(zip(jobs, run_jobs(folder, 2, list(jobs.values())), strict=True))
        (folder / "reports.json").write_text(json.dumps(reports))

    folder = fork_server.made_once(f"toy-training-{zero_stage}", make)
    return folder, json.loads((folder / "reports.json").read_text())


def _jobs(zero_stage: int, folder: Path) -> dict[str, dict[str, Any]]:
    jobs: dict[str, dict[str, Any]] = {}
    for optimizer in OPTIMIZERS:
        for precision in precisions_of(zero_stage, optimizer):
            name = f"{optimizer}-{precision}"
            common = {"stage": zero_stage, "optimizer": optimizer, "precision": precision, "accumulation": 2}
            # The poisoned step at its end changes nothing: the course is compared bitwise with one that has none.
            whole = {"output_dir": str(folder / f"{name}-whole"), "steps": 4, "poison": True}
            jobs[f"{name}-whole"] = common | whole
            if name == averaged_name(zero_stage):
                average = {"output_dir": str(folder / "averaged"), "steps": 4, "average": True}
                jobs["averaged"] = common | average
            halves = common | {"output_dir": str(folder / f"{name}-halves"), "steps": 2}
            jobs[f"{name}-first-half"] = jobs[f"{name}-second-half"] = halves
        jobs[f"{optimizer}-plain"] = {
            "stage": zero_stage,
            "optimizer": optimizer,
            "accumulation": 2,
            "output_dir": str(folder / f"{optimizer}-plain"),
            "steps": 2,
            "dropout": False,
            "poison": True,
        }
    return jobs
