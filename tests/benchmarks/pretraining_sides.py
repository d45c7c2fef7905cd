"""Running the two sides of `pretraining.py`: ours by the command that users start, the peer by its own script.

Both tell the same: points {"step", "seconds", "folder"}, where seconds are those of training up to that step, with
everything but saving and evaluating in them, and the folder holds the model in Hugging Face format.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pretraining_peer import Order

from data_prep.base.errors import UserError
from data_prep.base.settings import to_yaml
from trainer.checkpoint.format import step_folder
from trainer.config.run_config import RunConfig
from trainer.hf_export.export import export_checkpoint

REPOSITORY = Path(__file__).resolve().parents[2]
PROBED_STEPS, WARMING_STEPS = 10, 3


@dataclass(frozen=True)
class Place:
    """How one side uses the machine."""

    processes: int
    threads: int
    batch_rows: int
    accumulation_steps: int


def run_ours(config: RunConfig, work: Path, processes: int, cores: int) -> dict[str, Any]:
    """Train by `launch/pretrain.py` under the deepspeed launcher, and export every checkpoint."""
    run = Path(config.output_dir)
    for rest in (run, *work.glob("ours-*")):  # of one that was stopped, whose seconds nobody knows
        shutil.rmtree(rest, ignore_errors=True)
    (work / "config.yaml").write_text(to_yaml(config))
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(processes)]
    command += ["--master_port", str(_free_port()), str(REPOSITORY / "launch" / "pretrain.py"), "--config"]
    command += [str(work / "config.yaml")]
    whole_seconds = _run(command, work, max(1, cores // processes), work / "ours.log")
    if not (run / "history.jsonl").exists():  # the launcher says 0 where it was killed
        raise UserError(f"our training did not begin; {work}/ours.log ends:\n{(work / 'ours.log').read_text()[-3000:]}")
    events = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    started_at = next(event["at"] for event in events if event["event"] == "started")
    points = _points(run / "tracking" / "points.jsonl", events, started_at)
    for point in points:
        folder = f"ours-{point['step']:08}"
        export_checkpoint(step_folder(run, point["step"]), work / folder)
        point["folder"] = folder
    return {"points": points, "whole_seconds": whole_seconds}


def _points(path: Path, events: list[dict[str, Any]], started_at: float) -> list[dict[str, Any]]:
    """The saved steps; a step is logged when it is done, before it is saved."""
    logged = {}
    for line in path.read_text().splitlines():
        value = json.loads(line)
        if "train/loss" in value["m"]:
            logged[value["s"]] = value["t"] / 1000
    points, saving = [], 0.0
    for event in events:
        if event["event"] == "saved":
            points.append({"step": event["step"], "seconds": logged[event["step"]] - started_at - saving})
            saving += event["seconds"]
    return points


def choose_place(order: Order, work: Path, cores: int, uses_cuda: bool) -> tuple[Place, dict[str, float]]:
    """The fastest of a few ways in which the peer may use the machine, and the tokens a second of each."""
    rows = order.batch_rows * order.accumulation_steps
    candidates = [Place(1, cores, rows // parts, parts) for parts in (1, 2, 4) if rows % parts == 0]
    if cores > 1 and rows % cores == 0 and not uses_cuda:
        candidates.append(Place(cores, 1, rows // cores, 1))
    speeds: dict[Place, float] = {}
    length = order.config["data"]["sequence_length"]
    for place in candidates:
        probe = replace(order, steps=WARMING_STEPS + PROBED_STEPS, point_steps=WARMING_STEPS + PROBED_STEPS)
        told = run_peer(probe, place, work / "probe")
        seconds = told["step_seconds"]
        steps = [after - before for before, after in itertools.pairwise(seconds)][WARMING_STEPS - 1 :]
        speeds[place] = rows * length / statistics.median(steps)
        print(f"  transformers, {_named(place)}: {speeds[place]:,.0f} tokens/s", flush=True)
    best = max(speeds, key=lambda place: speeds[place])
    return best, {_named(place): speed for place, speed in speeds.items()}


def run_peer(order: Order, place: Place, folder: Path) -> dict[str, Any]:
    """Train by Trainer in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    order = replace(order, output=str(folder), batch_rows=place.batch_rows, accumulation_steps=place.accumulation_steps)
    path = folder / "order.json"
    path.write_text(json.dumps(asdict(order)))
    command = [sys.executable]
    if place.processes > 1:
        command += ["-m", "torch.distributed.run", "--nproc_per_node", str(place.processes)]
        command += ["--master_port", str(_free_port())]
    command += [str(REPOSITORY / "tests" / "benchmarks" / "pretraining_peer.py"), str(path)]
    whole_seconds = _run(command, folder, place.threads, folder / "peer.log")
    told: dict[str, Any] = json.loads((folder / "peer.json").read_text())
    for point in told["points"]:
        point["folder"] = f"{folder.name}/{point['folder']}"
    return told | {"whole_seconds": whole_seconds}


def _run(command: list[str], folder: Path, threads: int, log: Path) -> float:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}
    if not torch.cuda.is_available():
        environment["DS_ACCELERATOR"] = "cpu"
    started_at = time.perf_counter()
    with open(log, "w", encoding="utf-8") as file:
        done = subprocess.run(command, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        raise UserError(f"{command[-1]} ended with status {done.returncode}; {log} ends:\n{log.read_text()[-3000:]}")
    return time.perf_counter() - started_at


def _named(place: Place) -> str:
    processes = "1 process" if place.processes == 1 else f"{place.processes} processes"
    return f"{processes} of {place.threads} threads, {place.accumulation_steps} x {place.batch_rows} rows"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
