"""Pretraining where MLflow is not installed: every command on the way works, and the points reach a server later."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.mlflow_servers import Server
from tests.support.tracked_runs import all_runs, history
from tests.support.without_mlflow import environment_without_mlflow

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
MISSING = "mlflow is not installed"
NUM_STEPS = 8


@pytest.fixture
def run_without(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command of launch/ where there is no MLflow; its output is one text."""
    environment = environment_without_mlflow(tmp_path / "blocked")

    def run(command: str, *arguments: str | Path, status: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, str(LAUNCH / f"{command}.py"), *map(str, arguments)],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
        assert done.returncode == status, done.stdout
        assert "Traceback" not in done.stdout, done.stdout
        return done

    return run


@pytest.mark.slow
def test_a_run_without_mlflow_keeps_its_points_and_sends_them_later(
    training, run_without: Callable[..., subprocess.CompletedProcess[str]], server: Server, tmp_path: Path
) -> None:
    run = training(f"training.max_steps={NUM_STEPS}", "checkpoint.every_steps=4", "evaluation.every_steps=4")
    output_dir, arguments = run.output_dir, run.arguments()
    dry = run_without("pretrain", *arguments, "--dry-run").stdout
    assert not output_dir.exists() and MISSING not in dry, "a dry run tracks nothing"
    assert MISSING in run_without("doctor", *arguments, "checkpoint.every_steps=4").stdout
    first = run_without("pretrain", *arguments).stdout
    assert first.count(MISSING) == 1 and first.count("warning: mlflow") == 1, first
    assert f"clozeworks sync-tracking {output_dir}" in first.replace("\n", " ")
    shutil.rmtree(output_dir / "checkpoints" / "step-00000008")
    points = output_dir / "tracking" / "points.jsonl"
    before = points.read_bytes()
    assert "resum" in run_without("pretrain", *arguments).stdout
    assert points.read_bytes().startswith(before), "what was kept stays"

    status = run_without("status", output_dir).stdout
    assert f"{NUM_STEPS}" in status and "finished" in status
    config = ["--config", run.folder / "tiny.yaml", f"data.shards={run.shards}"]
    run_without("show_batch", *config)
    run_without("benchmark", *config, "--steps", "1", "--warmup-steps", "1", "--output", tmp_path / "figures.json")
    assert json.loads((tmp_path / "figures.json").read_text())["measurements"]
    run_without("export", "--checkpoint", output_dir, "--output", tmp_path / "exported")
    run_without("fill_mask", "--model", tmp_path / "exported", "the [MASK] crossed the river")
    for command in (
        ("sync_tracking", output_dir),
        ("register", "--model", tmp_path / "exported", "--name", "birds"),
        ("fill_mask", "--model", "models:/birds@champion", "a [MASK]"),
    ):
        refused = run_without(*command, status=2).stdout.strip()
        assert refused.startswith(f"error: {MISSING}") and "\n\n" not in refused, refused

    for _ in range(2):  # with MLflow, from here
        subprocess.run(
            [sys.executable, str(LAUNCH / "sync_tracking.py"), str(output_dir), "--tracking-uri", server.uri],
            check=True,
        )
    (sent,) = [each for each in all_runs(server.database) if each.info.run_name == output_dir.name]
    assert sent.info.status == "FINISHED"
    kept = [json.loads(line) for line in points.read_text().splitlines()]
    wanted = [(line["s"], line["m"]["train/loss"]) for line in kept if "train/loss" in line["m"]]
    assert [step for step, _ in wanted] == list(range(1, NUM_STEPS + 1))
    assert history(server.database, sent.info.run_id, "train/loss") == wanted


@pytest.mark.slow
def test_a_run_that_registers_says_what_was_not_registered(
    training, run_without: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    run = training("training.max_steps=2", "schedule.warmup_steps=0", "registry.name=birds")
    told = run_without("pretrain", *run.arguments(), status=1).stdout
    assert "was not registered as birds" in told and told.count(MISSING) == 2
