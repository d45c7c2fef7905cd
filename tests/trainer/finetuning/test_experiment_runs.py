"""The runs of an experiment in MLflow: a server that does not answer delays no fit, and every run is ended."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from data_prep.base.errors import UserError
from tests.support.tracked_runs import all_runs
from trainer.config.run_settings import TrackingSettings
from trainer.finetuning.experiment_runs import ExperimentRuns
from trainer.tracking.delivery import Delivery


def fit(runs: ExperimentRuns, seed: int) -> None:
    with runs.child(f"full-seed{seed}", {"learning_rate": 1e-3}) as run:
        run.log(8, {"valid/accuracy": 0.75})


@pytest.mark.long
def test_a_server_that_does_not_answer_delays_no_fit_and_is_reported_once(
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
    assert set(found) == {"full-seed0", "full-seed1"}
    for run in found.values():
        assert run.info.status == "FINISHED" and run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.data.metrics["valid/accuracy"] == 0.75 and run.data.params["learning_rate"] == "0.001"
    assert "not everything" not in capsys.readouterr().err


def test_a_fit_that_is_broken_off_ends_with_its_experiment(database: str, tmp_path: Path) -> None:
    runs = ExperimentRuns(TrackingSettings(uri=database), tmp_path / "fitted")
    fit(runs, 0)
    with pytest.raises(KeyboardInterrupt), runs, runs.child("full-seed1", {}):
        raise KeyboardInterrupt
    ended = {run.info.run_name: run.info.status for run in all_runs(database)}
    assert ended == {"fitted": "KILLED", "full-seed0": "FINISHED", "full-seed1": "KILLED"}


def test_a_fit_that_diverged_has_failed_and_the_next_continues(database: str, tmp_path: Path) -> None:
    runs = ExperimentRuns(TrackingSettings(uri=database), tmp_path / "fitted")
    with pytest.raises(UserError), runs.child("full-seed1", {}):
        raise UserError("the fit diverged")
    fit(runs, 0)
    runs.close("FINISHED")
    ended = {run.info.run_name: run.info.status for run in all_runs(database)}
    assert ended == {"fitted": "FINISHED", "full-seed0": "FINISHED", "full-seed1": "FAILED"}


def test_without_tracking_no_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = ExperimentRuns(None, Path())
    fit(runs, 0)
    runs.close("FINISHED")
    assert runs.parent.run_id is None and not list(tmp_path.iterdir())
