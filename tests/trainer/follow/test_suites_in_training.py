"""Suites during a run: which checkpoints, once, what becomes of a failure, and a run that is not disturbed."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from trainer.follow.suites_in_training import SuitesInTraining

from data_prep.base.errors import UsageError
from tests.support import fork_server
from tests.support.error_codes import coded
from tests.support.settings import validated
from tests.support.toy_run import CONFIG, tiny_config
from trainer.checkpoint.format import MARKER_NAME, step_folder
from trainer.checkpoint.late_scores import LateScores, read_late_scores, write_late_scores
from trainer.checkpoint.writer import _retire
from trainer.config.run_config import RunConfig
from trainer.config.run_settings import CheckpointSettings
from trainer.follow import suites_in_training as module

REPOSITORY = Path(__file__).resolve().parents[3]
SCORE = (
    "import json, sys; request = json.load(sys.stdin); print('a line'); "
    "print(json.dumps({'metrics': {'suite/own/average': 0.5}, 'facts': {'suite.own': 'd'}}))"
)
FAIL = (
    "import sys; sys.stdin.read(); print('error: the data is gone. Fix: get it. [gone]', file=sys.stderr); sys.exit(1)"
)
HANG = "import sys, time; sys.stdin.read(); time.sleep(600)"
SUITE = """
name: own
tasks:
  order: {function: minimal_pairs, files: {pairs: pairs.jsonl}, metrics: [accuracy]}
"""


class Lines(list[str]):
    def __call__(self, message: str) -> None:
        self.append(message)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / "suite.yaml").write_text(SUITE)
    evaluation = {"suite": str(tmp_path / "suite.yaml"), "suite_every_steps": 10}
    return tiny_config(tmp_path / "run", checkpoint={"every_steps": 5}, evaluation=evaluation)


def runs(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let the process run this code instead."""
    monkeypatch.setattr(module, "command_line", lambda: [sys.executable, "-c", code])


def checkpoint(config: RunConfig, step: int) -> Path:
    """A folder that looks like a whole checkpoint."""
    folder = step_folder(config.output_dir, step)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER_NAME).touch()
    return folder


def collected(suites: SuitesInTraining, count: int) -> list[Any]:
    """What has ended, once that many have."""
    found: list[Any] = []
    deadline = time.monotonic() + 60
    while len(found) < count and time.monotonic() < deadline:
        found += suites.collect()
        time.sleep(0.02)
    return found


def test_due_checkpoints_are_evaluated_once_across_starts(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    runs(monkeypatch, SCORE)
    first = SuitesInTraining(config, pytest.fail, Lines())
    assert [first.submit(step, checkpoint(config, step)) for step in (5, 10, 15)] == [False, True, False]
    assert read_late_scores(checkpoint(config, 10)).state == "pending"  # type: ignore[union-attr]
    ((step, folder, metrics),) = [(each.step, each.folder, each.metrics) for each in collected(first, 1)]
    assert (step, folder, metrics) == (10, checkpoint(config, 10), {"suite/own/average": 0.5})
    assert read_late_scores(folder) == LateScores(
        state="done", suite="own", metrics={"suite/own/average": 0.5}, facts={"suite.own": "d"}
    )
    first.submit(20, checkpoint(config, 20))
    first.wait(60)
    assert not first.is_complete and len(first.collect()) == 1 and first.is_complete

    again = SuitesInTraining(config, pytest.fail, Lines())
    again.submit_missed()
    assert not again.submit(10, checkpoint(config, 10))
    again.wait(60)
    assert again.collect() == []


def test_a_failed_or_killed_suite_is_reported_and_tried_by_the_next_start(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for code, reason in ((FAIL, "the data is gone"), (HANG, "killed by SIGKILL")):
        warnings = Lines()
        runs(monkeypatch, code)
        suites = SuitesInTraining(config, warnings, Lines())
        suites.submit(10, checkpoint(config, 10)) if code is FAIL else suites.submit_missed()
        if code is HANG:
            kill_child()
        assert [each.metrics for each in collected(suites, 1)] == [None]
        assert len(warnings) == 1 and reason in warnings[0] and "step 10" in warnings[0]
        assert read_late_scores(checkpoint(config, 10)).state == "failed"  # type: ignore[union-attr]
        suites.wait(60)
        assert not suites.is_complete


def kill_child() -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for child in psutil.Process().children():
            if HANG in child.cmdline():
                child.kill()
                return
        time.sleep(0.02)
    pytest.fail("no process was started")


@pytest.mark.parametrize("cause", ["a stop of the run", "a stop of its end", "the bound of its end"])
def test_a_suite_that_is_stopped_stays_pending(config: RunConfig, monkeypatch: pytest.MonkeyPatch, cause: str) -> None:
    runs(monkeypatch, HANG)
    warnings = Lines()
    suites = SuitesInTraining(config, warnings, Lines())
    for step in (10, 20):
        suites.submit(step, checkpoint(config, step))
    started_at = time.monotonic()
    if cause == "the bound of its end":
        suites.wait(0.2)
    elif cause == "a stop of its end":
        suites.wait(600, should_stop=lambda: True)
    else:
        suites.stop()
    assert time.monotonic() - started_at < 30 and suites.collect() == []
    assert len(warnings) == (cause == "the bound of its end") and not any(
        HANG in child.cmdline() for child in psutil.Process().children()
    )
    for step in (10, 20):
        assert read_late_scores(checkpoint(config, step)).state == "pending"  # type: ignore[union-attr]


def test_a_pending_checkpoint_is_kept_and_the_best_by_the_suite_too(tmp_path: Path) -> None:
    settings = CheckpointSettings(keep_last=1)
    for step, state in ((1, "pending"), (2, "done"), (3, None), (4, None)):
        folder = step_folder(tmp_path, step)
        folder.mkdir(parents=True)
        (folder / MARKER_NAME).touch()
        if state is not None:
            write_late_scores(folder, LateScores.model_validate({"state": state, "suite": "own"}))
    _retire(tmp_path, settings, 4, set(), pytest.fail)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000001", "step-00000004"]


@pytest.mark.parametrize(
    ("section", "values", "code"),
    [
        ("evaluation", {"suite_every_steps": 7}, "suite-steps"),
        ("checkpoint", {"keep_best": 1, "best_metric": "suite/own/average"}, "best-metric-not-measured"),
        ("checkpoint", {"keep_best": 1, "best_metric": "suite/own"}, "invalid-setting"),
    ],
)
def test_wrong_settings_of_suites_are_refused(section: str, values: dict[str, Any], code: str) -> None:
    base = CONFIG.model_dump(mode="json") | {"checkpoint": {"every_steps": 5}, "evaluation": {}}
    with pytest.raises(UsageError, check=coded(code)):
        validated(RunConfig, base | {section: {**base[section], **values}})


SCRIPT = """
import json, os, sys
from trainer.follow import suites_in_training
from trainer.api import train

settings, more, command = json.loads(sys.argv[1])
environment = dict(os.environ)  # in which its process is a fork, before the training adds to it
suites_in_training.command_line = lambda: command
suites_in_training.side_environment = lambda: environment
plain = train("tiny_cpu", settings | {"output_dir": "plain"})
scored = train("tiny_cpu", settings | more)
again = train("tiny_cpu", settings | more)
print(json.dumps([plain.status, scored.status, again.status, dict(plain.metrics), dict(scored.metrics)]))
"""


@pytest.mark.long
def test_a_run_with_suites_and_minimal_pairs_has_the_losses_of_one_without(
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
    }
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    command = fork_server.beside(module.command_line(), tmp_path)
    done = fork_server.run(["-c", SCRIPT, json.dumps([settings, more, command])], tmp_path, environment)
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
    assert history.count('"scored"') == 2 and history.count('"started"') == 1
    for step, score in points:
        assert read_late_scores(step_folder(tmp_path / "scored", step)).metrics["suite/own/order"] == score  # type: ignore[union-attr]
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
