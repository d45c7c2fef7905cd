"""Sending a tracked folder from elsewhere; with a server in trouble in tests/system/test_faults_tracking.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from data_prep.errors import UsageError, UserError
from launch import sync_tracking
from tests.tracked_runs import Warnings, all_runs, assert_complete, log_steps, open_tracker
from trainer.tracking.sync_tracking import sync, tracking_folders


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
    assert out.count("the run is FINISHED") == 4 and out.count("sent 0 bytes of points and 0 artifacts") == 2
    assert {path: path.read_bytes() for path in before} == before, "the training's own files are left alone"
    runs = all_runs(database)
    assert sorted(run.info.run_name for run in runs) == ["fits", "one"]
    for run in runs:
        assert_complete(database, run.info.run_id, 20)


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
    (synced,) = sync(tmp_path / "run", database, Warnings())
    (run,) = all_runs(database)
    (folder,) = tracking_folders(tmp_path / "run")
    assert f'"ended_at": {run.info.end_time}' in (folder / "run.json").read_text()


def test_what_cannot_be_sent_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.tracking.sync_tracking.MAX_RETRIES", 0)
    untracked(tmp_path / "run")
    with pytest.raises(UserError, match="was not sent to http://127.0.0.1:1 whole.*run the same command again"):
        list(sync(tmp_path / "run", "http://127.0.0.1:1", Warnings()))
    with pytest.raises(UserError, match="nothing was tracked"):
        tracking_folders(tmp_path / "run" / "tracking" / "artifacts")
    monkeypatch.setattr(sys, "argv", ["sync_tracking.py", str(tmp_path / "nowhere")])
    with pytest.raises(UsageError, match="is no folder"):
        sync_tracking.main()
