"""The runs of an experiment in MLflow: a server that is away holds up no fit, and every run that is begun is ended."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.tracked_runs import all_runs
from trainer.config.run_settings import TrackingSettings
from trainer.finetuning.experiment_runs import ExperimentRuns
from trainer.finetuning.fit import FitPoint
from trainer.tracking.delivery import Delivery

POINT = FitPoint(1.0, 8, "valid/accuracy", 0.5)


def fit(runs: ExperimentRuns, seed: int) -> None:
    run = runs.child("full", seed, 1e-3)
    run.record(POINT)
    run.finish({"accuracy": 0.75}, best_epoch=1, seconds=2.0)


@pytest.mark.long
def test_a_server_that_is_away_holds_up_no_fit_and_is_told_once(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(delivery: Delivery) -> None:
        raise ConnectionError("nothing answers")

    with monkeypatch.context() as away:
        away.setattr(Delivery, "send", refuse)
        runs = ExperimentRuns(TrackingSettings(uri=database), tmp_path / "fitted")
        started_at = time.monotonic()
        for seed in range(2):
            fit(runs, seed)
        assert time.monotonic() - started_at < 25.0  # 15 s each, if they waited for it
        (line,) = capsys.readouterr().err.splitlines()
        assert "nothing answers" in line
    runs.close("FINISHED")
    found = {run.info.run_name: run for run in all_runs(database)}
    parent = found.pop("fitted")
    assert set(found) == {"full-seed0-rate0.001", "full-seed1-rate0.001"}
    for run in found.values():
        assert run.info.status == "FINISHED" and run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.data.metrics["reported/accuracy"] == 0.75 and run.data.params["learning_rate"] == "0.001"
    assert "not everything" not in capsys.readouterr().err


def test_a_fit_that_is_broken_off_ends_with_its_experiment(database: str, tmp_path: Path) -> None:
    runs = ExperimentRuns(TrackingSettings(uri=database), tmp_path / "fitted")
    fit(runs, 0)
    runs.child("full", 1, 1e-3)
    runs.close("KILLED")
    ended = {run.info.run_name: run.info.status for run in all_runs(database)}
    assert ended == {"fitted": "KILLED", "full-seed0-rate0.001": "FINISHED", "full-seed1-rate0.001": "KILLED"}


def test_a_fit_that_diverged_has_failed_and_the_next_goes_on(database: str, tmp_path: Path) -> None:
    runs = ExperimentRuns(TrackingSettings(uri=database), tmp_path / "fitted")
    runs.child("full", 1, 1e-3).fail()
    fit(runs, 0)
    runs.close("FINISHED")
    ended = {run.info.run_name: run.info.status for run in all_runs(database)}
    assert ended == {"fitted": "FINISHED", "full-seed0-rate0.001": "FINISHED", "full-seed1-rate0.001": "FAILED"}


def test_without_tracking_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = ExperimentRuns(None, Path())
    fit(runs, 0)
    runs.close("FINISHED")
    assert runs.parent.run_id is None and not list(tmp_path.iterdir())
