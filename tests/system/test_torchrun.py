"""torchrun with a rendezvous, two "nodes" on this machine (tests/system/test_slurm.py has static addresses)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.free_ports import free_port
from tests.system.conftest import PRETRAIN, REPOSITORY, Training

pytestmark = [pytest.mark.slow, pytest.mark.launcher, pytest.mark.spawn]
SETTINGS = ("training.max_steps=12", "checkpoint.every_steps=100", "model.hidden_dropout_prob=0")


def losses(run: Training) -> dict[int, float]:
    points = (json.loads(line) for line in (run.output_dir / "tracking" / "points.jsonl").open())
    return {point["s"]: point["m"]["train/loss"] for point in points if "train/loss" in point["m"]}


def start_agent(run: Training, endpoint: str) -> subprocess.Popen[str]:
    words = [sys.executable, str(REPOSITORY / "launch" / "ranks.py"), "--nnodes", "2", "--nproc_per_node", "1"]
    words += ["--rdzv_backend", "c10d", "--rdzv_endpoint", endpoint, "--rdzv_id", "run", "--local_addr", "127.0.0.1"]
    return run._popen([*words, PRETRAIN, *run.arguments()])


def test_two_agents_that_meet_train_the_curve_of_one_rank(training):
    together = training(*SETTINGS)
    endpoint = f"127.0.0.1:{free_port()}"
    agents = [start_agent(together, endpoint) for _ in range(2)]
    outputs = [agent.communicate(timeout=400)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
    assert any("x 2 ranks x 2 gradient accumulation steps" in output for output in outputs)
    alone = training(*SETTINGS)
    alone.run(1)
    # float32 sums in another order, grown by Adam over 12 steps, as in test_ranks.py.
    assert losses(together) == pytest.approx(losses(alone), rel=2e-5) and len(losses(alone)) == 12
