"""A real training that saves by time, what it logs, and what `launch/status.py` says of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from tests.support.plain_ranks import run
from tests.system.conftest import REPOSITORY

pytestmark = pytest.mark.spawn

LOGGED = {
    "train/loss",
    "train/mlm_loss",
    "train/pair_loss",
    "train/pair_accuracy",
    "train/grad_norm",
    "train/learning_rate",
    "train/tokens_per_second",
    "train/seconds_per_step",
    "train/data_wait_share",
    "train/slowest_rank",
    "train/slowest_rank_seconds",
    "train/peak_memory_bytes",
    "train/mfu",
    "health/loss_spikes",
    "health/skipped_steps",
    "health/nats_below_unigram_entropy",
}


def test_a_training_saves_by_time_and_tells_how_it_goes(training):
    timed = training(
        "training.max_steps=4",
        "schedule.warmup_steps=1",
        "checkpoint.every_steps=5000",
        "checkpoint.every_minutes=1e-7",
        "checkpoint.keep_last=9",
        "logging.peak_flops_per_device=5e10",
        "logging.gpu_hour_price=3600000",
    )
    run(timed, 1)
    saved = sorted(path.name for path in (timed.output_dir / "checkpoints").iterdir())
    assert saved == [f"step-{step:08d}" for step in (1, 2, 3, 4)]
    points = [json.loads(line) for line in (timed.output_dir / "tracking" / "points.jsonl").open()]
    for step in (1, 2, 3, 4):
        metrics = {key: value for point in points if point["s"] == step for key, value in point["m"].items()}
        assert metrics.keys() >= LOGGED, LOGGED - metrics.keys()
        assert 0 <= metrics["train/data_wait_share"] <= 1 and metrics["train/mfu"] > 0

    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "launch" / "status.py"), str(timed.output_dir)],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for line in (
        r"state +finished",
        r"step +4 of 4, [\d.]+ s each",
        r"time left +0:00:00",
        r"tokens +[\d,]+",
        r"loss +[\d.]+ \(train\), [\d.]+ \(valid MLM, step 4\)",
        r"last checkpoint +step 4, ",
        r"rank-hours +[\d.]+ spent, 0.00 remaining",
        r"cost +[1-9][\d,.]+ spent, 0.00 remaining",
        r"time training +[\d.]+%",
        r"restarts +0",
    ):
        assert re.search(f"^{line}", done.stdout, re.MULTILINE), done.stdout
