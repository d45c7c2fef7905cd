"""A training as plain processes, without a launcher: every rank's own exit status and output."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support import fork_server
from tests.support.fork_server import Started
from tests.support.free_ports import free_port
from tests.system.conftest import PRETRAIN, REPOSITORY, Training

TROUBLED = str(Path(__file__).with_name("troubled_pretrain.py"))


@dataclass
class Rank:
    """One rank's process; its output, both streams, is a file that can be read while it runs."""

    process: Started
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


@dataclass(frozen=True)
class Host:
    """What one host does otherwise than the others."""

    settings: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    folder: Path | None = None
    """Where its rank is started."""


def start(
    training: Training,
    num_ranks: int,
    *more: str,
    trouble: dict[str, Any] | None = None,
    hosts: dict[int, Host] | None = None,
    address: str = "127.0.0.1",
) -> list[Rank]:
    """Start the ranks of a training as a launcher would; one alone is started without any such environment.

    `hosts` says which ranks are started otherwise than the rest.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in names}
    env |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), **training.env}
    if num_ranks > 1:
        env |= {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": address, "MASTER_PORT": str(free_port())}
    script = PRETRAIN
    if trouble is not None:
        env, script = env | {"TROUBLE": json.dumps(trouble), "TROUBLE_ROWS": str(training.folder)}, TROUBLED
    ranks = []
    for rank in range(num_ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if num_ranks > 1 else {}
        host = (hosts or {}).get(rank, Host())
        log = training.folder / f"start-{len(list(training.folder.glob('start-*')))}-rank-{rank}.log"
        with open(log, "wb") as file:
            words = [script, *training.arguments(), *more, *host.settings]
            process = fork_server.start(words, host.folder or training.folder, env | own | host.env, file.fileno())
        ranks.append(Rank(process, log))
    return ranks


def finish(ranks: list[Rank], timeout: float = 300) -> list[int]:
    """Wait for all ranks; their exit statuses."""
    deadline = time.monotonic() + timeout
    try:
        return [rank.process.wait(max(0.1, deadline - time.monotonic())) for rank in ranks]
    finally:
        for rank in ranks:
            rank.process.kill()


def run(training: Training, num_ranks: int, *more: str, trouble: dict[str, Any] | None = None, status: int = 0) -> str:
    """Start, wait, and return what all ranks said; each must end with `status`."""
    return "".join(outputs(start(training, num_ranks, *more, trouble=trouble), status))


def outputs(ranks: list[Rank], status: int = 0) -> list[str]:
    """Wait, and return what each rank said; each must end with `status`."""
    statuses = finish(ranks)
    said = [rank.output for rank in ranks]
    assert statuses == [status] * len(ranks), "".join(said)
    return said


def wait_until(true: Callable[[], bool], ranks: list[Rank], timeout: float = 900) -> None:
    """Wait for something that comes while the ranks run."""
    deadline = time.monotonic() + timeout
    while not true():
        assert all(rank.process.poll() is None for rank in ranks), "".join(rank.output for rank in ranks)
        assert time.monotonic() < deadline, "it did not come in time"
        time.sleep(0.02)


def send(number: signal.Signals, *ranks: Rank) -> None:
    for rank in ranks:
        rank.process.send_signal(number)


def losses(training: Training, folder: str = "tracking") -> dict[int, float]:
    """The loss of each step, which was logged once."""
    path = training.output_dir / folder / "points.jsonl"
    points = [json.loads(line) for line in path.read_text().splitlines()]
    found = [(point["s"], point["m"]["train/loss"]) for point in points if "train/loss" in point["m"]]
    assert len(dict(found)) == len(found), "a step was logged twice"
    return dict(found)


def final_tensors(training: Training) -> dict[str, str]:
    """sha256 of every rank's file of the newest checkpoint: weights and optimizer state."""
    marker = json.loads((newest_checkpoint(training) / "checkpoint.json").read_text())
    return {file["name"]: file["sha256"] for file in marker["files"] if file["name"].endswith(".safetensors")}


def newest_checkpoint(training: Training) -> Path:
    return max((training.output_dir / "checkpoints").glob("step-*"))
