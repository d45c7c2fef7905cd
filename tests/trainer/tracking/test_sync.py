"""Sending a tracked folder from elsewhere; with a server in trouble in tests/system/test_faults_tracking.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from data_prep.base.errors import UsageError, UserError
from launch import sync_tracking
from tests.support.error_codes import coded
from tests.support.tracked_runs import Warnings, all_runs, assert_complete, log_steps, open_tracker, wait_until
from trainer.config.run_settings import TrackingSettings
from trainer.tracking.mlflow_server import connect
from trainer.tracking.sync import sync, tracking_folders
from trainer.tracking.tracker import Tracker

pytestmark = pytest.mark.long


def untracked(folder: Path, **more: str) -> None:
    """A run that reached no server."""
    tracker = open_tracker("http://127.0.0.1:1", folder, Warnings(), patience=0.0, **more)
    log_steps(tracker, range(1, 21))
    tracker.close("FINISHED", timeout_seconds=0.1)


def test_every_tracking_folder_is_sent_once(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    untracked(tmp_path / "fits")
    untracked(tmp_path / "fits" / "runs" / "one", run_name="one")
    before = {path: path.read_bytes() for path in (tmp_path / "fits").rglob("*") if path.is_file()}
    monkeypatch.setattr(sys, "argv", ["sync_tracking.py", str(tmp_path / "fits"), "--tracking-uri", database])
    for _ in range(2):
        sync_tracking.main()
    out = capsys.readouterr().out
    assert out.count("the run is FINISHED") == 4 and out.count("sent 0 bytes of metrics and 0 artifacts") == 2
    assert {path: path.read_bytes() for path in before} == before, "the training's own files are left alone"
    runs = all_runs(database)
    assert sorted(run.info.run_name for run in runs) == ["fits", "one"]
    for run in runs:
        assert_complete(database, run.info.run_id, 20)


def test_runs_that_never_saw_a_server_stand_under_their_parent_once_they_are_sent(
    database: str, tmp_path: Path
) -> None:
    parent = open_tracker("http://127.0.0.1:1", tmp_path / "fits", Warnings(), patience=0.0)
    folder = tmp_path / "fits" / "runs" / "one"  # which sorts before the parent's own folder
    child = Tracker.open(TrackingSettings(uri="http://127.0.0.1:1"), folder, Warnings(), 0.0, parent.run_uuid)
    for tracker in (child, parent):
        log_steps(tracker, range(1, 4))
        tracker.close("FINISHED", timeout_seconds=0.1)
    for _ in range(2):
        older, younger = sync(tmp_path / "fits", database, Warnings())
    tags = {run.info.run_id: run.data.tags for run in all_runs(database)}
    assert len(tags) == 2 and "mlflow.parentRunId" not in tags[older.run_id]
    assert tags[younger.run_id]["mlflow.parentRunId"] == older.run_id


def test_a_run_with_a_missing_parent_is_sent_and_warned_of_as_incomplete(database: str, tmp_path: Path) -> None:
    told = Warnings()
    settings = TrackingSettings(uri=database)
    child = Tracker.open(settings, tmp_path / "one", told, parent_uuid="of-nobody")
    log_steps(child, range(1, 4))
    wait_until(lambda: not child._delivery.unsent_bytes)
    child.close("FINISHED", timeout_seconds=1.0)
    assert len(told) == 1 and "not everything was sent" in told[0]
    assert child.run_id is not None
    assert_complete(database, child.run_id, 3)
    parent = open_tracker(database, tmp_path / "parent")
    path = tmp_path / "one" / "tracking" / "run.json"
    path.write_text(path.read_text().replace("of-nobody", parent.run_uuid))
    again = Tracker.open(settings, tmp_path / "one", told)
    again.close("FINISHED")
    parent.close("FINISHED")
    assert len(told) == 1
    assert connect(database).get_run(child.run_id).data.tags["mlflow.parentRunId"] == parent.run_id


def test_a_torn_last_line_is_left_to_its_writer(database: str, tmp_path: Path) -> None:
    untracked(tmp_path / "run")
    points = tmp_path / "run" / "tracking" / "points.jsonl"
    whole = points.read_bytes()
    points.write_bytes(whole + b'{"t":1,"s":21,"m":{"train/lo')
    (synced,) = sync(tmp_path / "run", database, Warnings())
    assert synced.num_bytes == len(whole)
    assert points.read_bytes().endswith(b"train/lo")


def test_the_time_of_the_end_is_the_trainings(database: str, tmp_path: Path) -> None:
    untracked(tmp_path / "run")
    assert len(list(sync(tmp_path / "run", database, Warnings()))) == 1
    (run,) = all_runs(database)
    (folder,) = tracking_folders(tmp_path / "run")
    assert f'"ended_at": {run.info.end_time}' in (folder / "run.json").read_text()


def test_artifacts_that_are_lost_or_lead_elsewhere_are_left_out(database: str, tmp_path: Path) -> None:
    tracker = open_tracker("http://127.0.0.1:1", tmp_path / "run", Warnings(), patience=0.0)
    for name in ("config.yaml", "curves/loss.png", "data/manifest.json"):
        tracker.log_artifact_text(name, "kept")
    tracker.close("FINISHED", timeout_seconds=0.1)
    artifacts, private = tmp_path / "run" / "tracking" / "artifacts", tmp_path / "private.txt"
    private.write_text("private")
    (artifacts / "curves" / "loss.png").unlink()
    (artifacts / "config.yaml").unlink()
    (artifacts / "config.yaml").symlink_to(private)
    told = Warnings()
    (synced,) = sync(tmp_path / "run", database, told)
    assert (synced.num_artifacts, synced.status) == (1, "FINISHED")
    assert len(told) == 2 and "config.yaml is a link to a file outside" in told[0] and "loss.png is lost" in told[1]
    sent = [path for path in (tmp_path / "mlruns").rglob("*") if path.is_file()]
    assert [path.name for path in sent] == ["manifest.json"]
    again = open_tracker(database, tmp_path / "run", told)
    again.log_artifact_text("curves/loss.png", "drawn again")
    again.close("FINISHED")
    assert again.is_complete and sum("config.yaml is a link" in each for each in told) == 2, "told once a start"
    assert "drawn again" in [path.read_text() for path in (tmp_path / "mlruns").rglob("loss.png")]


def test_artifacts_that_were_moved_to_another_disk_are_sent(database: str, tmp_path: Path) -> None:
    tracker = open_tracker("http://127.0.0.1:1", tmp_path / "run", Warnings(), patience=0.0)
    tracker.log_artifact_text("config.yaml", "kept")
    tracker.close("FINISHED", timeout_seconds=0.1)
    artifacts = tmp_path / "run" / "tracking" / "artifacts"
    artifacts.rename(tmp_path / "other_disk")
    artifacts.symlink_to(tmp_path / "other_disk")
    told = Warnings()
    (synced,) = sync(tmp_path / "run", database, told)
    assert synced.num_artifacts == 1 and not told


def test_metrics_that_cannot_be_sent_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.tracking.sync.MAX_RETRIES", 0)
    untracked(tmp_path / "run")
    with pytest.raises(UserError, check=coded("metrics-not-sent"), match="http://127.0.0.1:1 "):
        list(sync(tmp_path / "run", "http://127.0.0.1:1", Warnings()))
    with pytest.raises(UserError, check=coded("nothing-tracked"), match="artifacts"):
        tracking_folders(tmp_path / "run" / "tracking" / "artifacts")
    monkeypatch.setattr(sys, "argv", ["sync_tracking.py", str(tmp_path / "nowhere")])
    with pytest.raises(UsageError, check=coded("missing-output-dir"), match="nowhere does not exist"):
        sync_tracking.main()
