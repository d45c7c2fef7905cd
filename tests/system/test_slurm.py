"""launch/slurm/pretrain.sh with real runs: stand-ins for sbatch, srun and scontrol, two "nodes" of a rank each."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.system.conftest import REPOSITORY, Training
from trainer.tracking.status import read_status

pytestmark = [pytest.mark.launcher, pytest.mark.spawn]

_STUBS = {
    "sbatch": 'while [[ $1 == --* ]]; do shift; done; cp "$1" "$STATE/slurm_script"; shift\n'
    "export SLURM_JOB_NODELIST=node[1-2] SLURM_JOB_NUM_NODES=2\n"
    'bash "$STATE/slurm_script" "$@" >>"$STATE/log" 2>&1; echo $? >"$STATE/status"; echo "$SLURM_JOB_ID"\n',
    "scontrol": 'if [[ $1 == show ]]; then printf "127.0.0.1\\n127.0.0.1\\n"; else echo "$@" >>"$STATE/requeued"; fi\n',
    # As srun: a task on every node at once, and the highest status of them.
    "srun": "while [[ $1 == --* ]]; do shift; done\n"
    'SLURM_NODEID=0 "$@" & first=$!; SLURM_NODEID=1 "$@" & second=$!\n'
    "status=0; for task in $first $second; do wait $task; code=$?; ((code > status)) && status=$code; done\n"
    "exit $status\n",
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "bin").mkdir()
    (tmp_path / "state").mkdir()
    for name, text in _STUBS.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/usr/bin/env bash\n{text}")
        path.chmod(0o755)
    return os.environ | {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "STATE": str(tmp_path / "state"),
        "CLOZEWORKS_VENV": sys.prefix,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "SLURM_JOB_ID": str(job_id()),
    }


def job_id() -> int:
    """One whose port, which follows from it, is free."""
    for number in range(os.getpid() % 10000, 20000):
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", 20000 + number))
            return 40000 + number
    raise AssertionError("no port is free")


def submit(run: Training, environment: dict[str, str]) -> subprocess.Popen[str]:
    script = str(REPOSITORY / "launch" / "slurm" / "pretrain.sh")
    return subprocess.Popen(
        ["bash", script, "--nodes", "2", "--gpus", "1", "--volume", str(run.folder), "--", *run.arguments()],
        env=environment,
    )


def of_the_step(run: Training) -> list[psutil.Process]:
    """What Slurm would signal: torchrun, ranks and workers, not the batch script."""
    return [each for each in run.processes() if Path((each.cmdline() or [""])[0]).name.startswith("python")]


@pytest.mark.slow
def test_a_job_saves_on_slurms_signal_goes_back_into_the_queue_and_ends(environment, training):
    run = training("training.max_steps=60", "checkpoint.every_steps=1000", "evaluation.every_steps=1000")
    state = Path(environment["STATE"])
    job = submit(run, environment)
    deadline = time.monotonic() + 240
    while run.last_logged_step() < 5:
        assert job.poll() is None and time.monotonic() < deadline, (state / "log").read_text()
        time.sleep(0.02)
    for each in of_the_step(run):
        each.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=240) == 0
    log = (state / "log").read_text()
    assert read_status(run.output_dir).state == "stopped", log
    assert "exit status 75: requeueing the job" in log, log
    assert (state / "requeued").read_text() == f"requeue {environment['SLURM_JOB_ID']}\n"
    _, alive = psutil.wait_procs(run.processes(), timeout=60)  # a worker sees within seconds that its rank is gone
    assert not alive

    assert submit(run, environment | {"SLURM_RESTART_COUNT": "1"}).wait(timeout=300) == 0
    assert (state / "status").read_text() == "0\n", (state / "log").read_text()
    points = (json.loads(line) for line in (run.output_dir / "tracking" / "points.jsonl").open())
    assert Counter(point["s"] for point in points if "train/loss" in point["m"]) == Counter(range(1, 61))
