"""A real run whose checkpoints are scored and registered beside it: it is not disturbed, and all of it is attached."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.support import fork_server
from tests.support.follower_jobs import ROOT, SUITE
from trainer.checkpoint.format import step_folder
from trainer.checkpoint.late_scores import read_late_scores
from trainer.follow.follower import job_command
from trainer.tracking.mlflow_server import connect

FOLLOWER = """
import json, os, sys
from trainer.follow import follower

words, environment = json.loads(sys.argv[1])
follower.job_command = lambda module: [word if word != "MODULE" else module for word in words]
follower.side_environment = lambda: environment
sys.argv[1:] = sys.argv[2:]
follower.run_command(follower.main)
"""
SCRIPT = """
import json, os, sys
from trainer.follow import client
from trainer.api import train

settings, more, words, code = json.loads(sys.argv[1])
# In which the process of a job is a fork, before the training adds to it.
environment = dict(os.environ)
command = [sys.executable, "-c", code, json.dumps([words, environment])]
client.follower_command = lambda: [*command, str(os.getpid())]
plain = train("tiny_cpu", settings | {"output_dir": "plain"})
scored = train("tiny_cpu", settings | more)
again = train("tiny_cpu", settings | more)
print(json.dumps([plain.status, scored.status, again.status, dict(plain.metrics), dict(scored.metrics)]))
"""


@pytest.mark.long
def test_a_run_with_suites_minimal_pairs_and_registrations_has_the_losses_of_one_without(
    small_shards: Path, tmp_path: Path, empty_database: Path
) -> None:
    """And their scores are in MLflow at the checkpoints' steps, in status, history, checkpoints and exports."""
    from trainer.hf_export.export import export_checkpoint

    pairs = [
        ("the river crossed the village.", "the river the crossed village."),
        ("the old bridge.", "bridge old the."),
    ]
    lines = [json.dumps({"sentence_good": good, "sentence_bad": bad}) for good, bad in pairs]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    (tmp_path / "suite.yaml").write_text(SUITE)
    settings = {
        "data.shards": str(small_shards),
        "data.sequence_length": 32,
        "data.num_workers": 0,
        "training.max_steps": 6,
        "training.micro_batch_tokens": 128,
        "training.global_batch_tokens": 256,
        "model.hidden_size": 16,
        "model.num_hidden_layers": 1,
        "model.num_attention_heads": 2,
        "model.intermediate_size": 32,
        "model.hidden_dropout_prob": 0.5,
        "evaluation.max_tokens": 512,
        "evaluation.every_steps": 3,
        "checkpoint.every_steps": 3,
        "logging.every_steps": 1,
        "tracking.uri": "sqlite:///mlflow.db",
    }
    more = {
        "output_dir": "scored",
        "evaluation.minimal_pairs": "pairs.jsonl",
        "evaluation.suite": "suite.yaml",
        "evaluation.suite_every_steps": 3,
        "checkpoint.keep_best": 1,
        "checkpoint.best_metric": "suite/own/order",
        "registry.name": "followed",
        "registry.promote_to": "champion",
        "registry.only_if": "suite/own/average > -1",
    }
    environment = os.environ | {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    words = fork_server.beside(job_command("MODULE"), tmp_path)
    done = fork_server.run(["-c", SCRIPT, json.dumps([settings, more, words, FOLLOWER])], tmp_path, environment)
    assert done.returncode == 0, done.stderr
    *statuses, plain, scored = json.loads(done.stdout.splitlines()[-1])
    assert statuses == ["finished"] * 3
    assert losses(tmp_path / "plain") == losses(tmp_path / "scored") and len(losses(tmp_path / "plain")) == 6
    assert plain["valid/mlm_loss"] == scored["valid/mlm_loss"] and "valid/minimal_pairs_accuracy" in scored

    points = [
        (step, metrics["suite/own/order"])
        for step, metrics in points_of(tmp_path / "scored")
        if "suite/own/order" in metrics
    ]
    assert [step for step, _ in points] == [3, 6], f"once each, though the same command ran again\n{done.stderr}"
    assert done.stdout.count("suite own/order") == 2
    status = json.loads((tmp_path / "scored" / "status.json").read_text())
    assert status["state"] == "finished" and status["metrics"]["suite/own/order"] == points[-1][1]
    history = (tmp_path / "scored" / "history.jsonl").read_text()
    assert history.count('"scored"') == 2
    for step, score in points:
        assert read_late_scores(step_folder(tmp_path / "scored", step)).metrics["suite/own/order"] == score  # type: ignore[union-attr]
    assert done.stdout.count("registered step 6 as followed version 1; promoted to champion") == 1
    version = connect(f"sqlite:///{tmp_path}/mlflow.db").get_model_version_by_alias("followed", "champion")
    assert int(version.version) == 1 and version.tags["clozeworks.step"] == "6"
    export_checkpoint(tmp_path / "scored", tmp_path / "export")
    provenance = json.loads((tmp_path / "export" / "provenance.json").read_text())
    assert provenance["scores"]["suite/own/average"] == points[-1][1]
    assert "suite/own/average" in (tmp_path / "export" / "README.md").read_text()


def points_of(run: Path) -> list[tuple[int, dict[str, float]]]:
    """What the run logged, by step."""
    (path,) = (run / "tracking").glob("*.jsonl")
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [(each["s"], each["m"]) for each in found if "m" in each]


def losses(run: Path) -> list[tuple[int, float]]:
    return [(step, metrics["train/loss"]) for step, metrics in points_of(run) if "train/loss" in metrics]
