"""Going back to an earlier checkpoint and on without some samples, in a new MLflow run under the old one."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from trainer.checkpoint.format import CheckpointFolder, step_folder

pytestmark = pytest.mark.spawn
SETTINGS = ("training.max_steps=6", "schedule.warmup_steps=1", "checkpoint.every_steps=2", "checkpoint.keep_last=9")


def run_alone(training, *more: str) -> str:
    """One process without a launcher."""
    from tests.system.conftest import PRETRAIN, REPOSITORY

    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, PRETRAIN, *training.arguments(), *more],
        cwd=training.folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def losses(training, folder: str = "tracking") -> dict[int, float]:
    points = (json.loads(line) for line in (training.output_dir / folder / "points.jsonl").open())
    return {point["s"]: point["m"]["train/loss"] for point in points if "train/loss" in point["m"]}


@pytest.mark.slow
def test_a_run_goes_on_from_an_earlier_step_without_some_samples(training):
    from mlflow import MlflowClient

    run = training(*SETTINGS)
    run_alone(run)
    old = losses(run)
    assert list(old) == [1, 2, 3, 4, 5, 6]
    command = ("--resume-from", "2", "--skip-samples", "32:48,50:52")  # all of step 3, two rows of step 4
    output = run_alone(run, *command)
    assert "resuming after step 2" in output and "branching from step 2" in output and "32:48" in output

    new = losses(run)
    assert losses(run, "tracking-1") == old
    assert list(new) == [4, 5, 6], "step 3 predicts nothing"
    assert new[4] != old[4] and "all samples skipped" in output
    states = [CheckpointFolder(step_folder(run.output_dir, step)).read_state() for step in (2, 4, 6)]
    assert [state.state.branched_at for state in states] == [2, 2, 2]
    assert states[0].optimizer_steps == 2 and states[2].optimizer_steps == 5, "the empty batch made no update"
    assert [str(r) for r in states[2].state.skipped_samples] == [
        "stage 0 epoch 0 samples 32:48",
        "stage 0 epoch 0 samples 50:52",
    ]
    client = MlflowClient(run.tracking_uri)
    (experiment,) = [found for found in client.search_experiments() if found.name == "clozeworks"]
    younger, older = client.search_runs([experiment.experiment_id])
    assert younger.data.tags["mlflow.parentRunId"] == older.info.run_id
    assert younger.data.tags["clozeworks.resumed_from_step"] == "2"

    again = run_alone(run, *command)
    assert "resuming after step 6 of 6" in again, "the branch is taken once"
