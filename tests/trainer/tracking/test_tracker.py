"""Tracking against real MLflow stores: every point once and in order, and a training that never waits."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Metric

from data_prep.base.errors import UsageError
from tests.support.disk_events import Flushed, record_disk_events
from tests.support.error_codes import coded
from tests.support.tracked_runs import (
    KEYS,
    Warnings,
    all_runs,
    assert_complete,
    half_made_database,
    history,
    log_steps,
    open_tracker,
    wait_until,
)
from trainer.tracking.journal import DataSetInput
from trainer.tracking.mlflow_server import MlflowNotInstalled, connect
from trainer.tracking.sync import sync
from trainer.tracking.tracker import NullTracker


@pytest.mark.long
def test_a_run_with_all_it_has_stands_in_the_embedded_default(database: str, tmp_path: Path) -> None:
    tracker = open_tracker(None, tmp_path / "my-run", experiment="birds")
    assert tracker.run_id is not None
    tracker.log_params({"model": {"hidden_size": 64, "name": None}, "seed": 0})
    tracker.log_tags({"manifest": "abc"})
    tracker.log_artifact_text("config/resolved.yaml", "seed: 0\n")
    log_steps(tracker, range(1, 2501))
    tracker.close("FINISHED")
    client = connect(database)
    run = client.get_run(tracker.run_id)
    assert run.data.params == {"model.hidden_size": "64", "model.name": "null", "seed": "0"}
    assert run.data.tags["manifest"] == "abc"
    assert (run.info.status, run.info.run_name) == ("FINISHED", "my-run")
    assert client.get_experiment(run.info.experiment_id).name == "birds"
    assert (tmp_path / "mlruns" / run.info.experiment_id / tracker.run_id / "artifacts/config/resolved.yaml").is_file()
    assert_complete(database, tracker.run_id, 2500)


def test_a_resumed_run_repeats_no_step(database: str, tmp_path: Path) -> None:
    first = open_tracker(database, tmp_path / "run")
    first.log_params({"seed": 1})
    log_steps(first, range(1, 31))
    first.close("KILLED")
    told = Warnings()
    second = open_tracker(database, tmp_path / "run", told)
    assert second.run_id == first.run_id
    assert connect(database).get_run(first.run_id).info.status == "RUNNING"
    second.log_params({"seed": 2, "more": True})
    log_steps(second, range(21, 51))
    second.close("FINISHED")
    assert_complete(database, first.run_id, 50)
    assert len(all_runs(database)) == 1
    assert connect(database).get_run(first.run_id).data.params == {"seed": "1", "more": "true"}
    assert len(told) == 1 and "seed (was 1, is 2)" in told[0]


@pytest.mark.long
def test_a_copied_folder_is_a_run_of_its_own_and_a_moved_one_is_not(database: str, tmp_path: Path) -> None:
    def resume(name: str, steps: range, warn: Warnings | None = None, params: Mapping[str, str] = {}) -> str | None:
        tracker = open_tracker(database, tmp_path / name, warn)
        tracker.log_params(params)
        log_steps(tracker, steps)
        tracker.close("FINISHED")
        return tracker.run_id

    told = Warnings()
    base = resume("base", range(1, 4), params={"output_dir": "base"})
    list(sync(tmp_path / "base", database, told))  # which leaves a record of its own
    (tmp_path / "link").symlink_to("base")
    for name in ("copy", "spare"):
        shutil.copytree(tmp_path / "base", tmp_path / name)
    assert resume("base", range(4, 5)) == base
    copy = resume("copy", range(4, 7), told, {"output_dir": "copy"})
    assert connect(database).get_run(str(copy)).data.params == {"output_dir": "copy"}
    assert len(told) == 1 and f"copy of {tmp_path}/base/tracking" in told[0]
    assert resume("base", range(5, 6)) == resume("link", range(6, 6)) == base != copy
    list(sync(tmp_path / "copy", database, told))
    (tmp_path / "copy").rename(tmp_path / "moved")
    shutil.rmtree(tmp_path / "base")
    assert resume("moved", range(7, 8)) == copy and resume("spare", range(6, 7)) == base
    assert len(all_runs(database)) == 2 and len(told) == 1
    assert_complete(database, str(copy), 7)
    assert_complete(database, str(base), 6)


def test_a_folder_that_was_staged_elsewhere_continues_with_its_run(database: str, tmp_path: Path) -> None:
    """To the disk of a job and back, whose originals lie there still."""
    for name, target, steps in (("shared", "local", range(1, 4)), ("local", "shared", range(4, 7))):
        tracker = open_tracker(database, tmp_path / name)
        log_steps(tracker, steps)
        tracker.close("FINISHED")
        shutil.copytree(tmp_path / name, tmp_path / target, dirs_exist_ok=True)
    tracker = open_tracker(database, tmp_path / "shared")
    log_steps(tracker, range(7, 9))
    tracker.close("FINISHED")
    (run,) = all_runs(database)
    assert_complete(database, run.info.run_id, 8)


def test_the_next_start_sends_metrics_that_a_kill_left_unsent(database: str, tmp_path: Path) -> None:
    killed = open_tracker(database, tmp_path / "run")
    log_steps(killed, range(1, 11))
    killed._deadline = 0.0
    killed._closing.set()
    killed._thread.join()
    killed._delivery.advance(offset=0, run_id=None)  # the server had them, but the kill came before that was noted
    with open(tmp_path / "run/tracking/points.jsonl", "ab") as file:
        file.write(b'{"t":1,"s":11,"m":{"train/lo')
    resumed = open_tracker(database, tmp_path / "run")
    log_steps(resumed, range(9, 16))
    resumed.close("FINISHED")
    assert len(all_runs(database)) == 1
    assert_complete(database, resumed.run_id, 15)


def test_a_server_gets_no_point_that_is_not_on_the_disk(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = record_disk_events(monkeypatch)
    log_batch, sent = MlflowClient.log_batch, []

    def recorded(client: MlflowClient, run_id: str, metrics: Sequence[Metric] = (), **more: Any) -> None:
        points = [event for event in events if isinstance(event, Flushed) and event.path.name == "points.jsonl"]
        on_disk = {json.loads(line)["s"] for line in points[-1].content.splitlines()} if points else set()
        sent.extend((metric.step, metric.step in on_disk) for metric in metrics)
        return log_batch(client, run_id, metrics, **more)

    monkeypatch.setattr(MlflowClient, "log_batch", recorded)
    tracker = open_tracker(database, tmp_path / "run")
    log_steps(tracker, range(1, 11))
    tracker.close("FINISHED")
    assert {step for step, _ in sent} == set(range(1, 11)) and all(is_on_disk for _, is_on_disk in sent)


def test_a_value_that_mlflow_refuses_holds_up_no_other(database: str, tmp_path: Path) -> None:
    told = Warnings()
    tracker = open_tracker(database, tmp_path / "run", told)
    tracker.log(1, {"good": 1.0, "bad key!": 2.0, "not a number": math.nan, "infinite": math.inf, "last": 3.0})
    tracker.close("FINISHED")
    metrics = connect(database).get_run(tracker.run_id).data.metrics
    assert metrics["good"] == 1.0 and metrics["last"] == 3.0 and math.isnan(metrics["not a number"])
    assert len(told) == 1 and "bad key!" in told[0]


def test_curves_that_cannot_be_drawn_are_reported_and_fail_nothing(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(journal: object) -> bytes:
        raise ValueError("arange: cannot compute length")  # as matplotlib does over values of +-1e308

    monkeypatch.setitem(sys.modules, "trainer.tracking.figures", SimpleNamespace(draw_run=fail, PICTURE=""))
    told = Warnings()
    tracker = open_tracker(database, tmp_path / "run", told)
    tracker.log_picture()
    tracker.close("FINISHED")
    assert len(told) == 1 and f"{tmp_path}/run/tracking cannot be drawn (arange: cannot compute length)" in told[0]
    assert connect(database).get_run(tracker.run_id).info.status == "FINISHED"


@pytest.mark.long
def test_another_server_gets_the_whole_curve(database: str, empty_database: Path, tmp_path: Path) -> None:
    first = open_tracker(database, tmp_path / "run")
    log_steps(first, range(1, 6))
    first.close("KILLED")
    shutil.copy(empty_database, tmp_path / "second.db")
    told = Warnings()
    second = open_tracker(f"sqlite:///{tmp_path}/second.db", tmp_path / "run", told)
    log_steps(second, range(6, 9))
    second.close("FINISHED")
    assert_complete(f"sqlite:///{tmp_path}/second.db", second.run_id, 8)
    assert len(told) == 1 and database in told[0]


@pytest.mark.long
def test_a_server_that_tracks_the_run_again_gets_only_missing_points(
    database: str, empty_database: Path, tmp_path: Path
) -> None:
    shutil.copy(empty_database, tmp_path / "second.db")
    sent = []
    for uri, steps in (
        (database, range(1, 6)),
        (f"sqlite:///{tmp_path}/second.db", range(6, 9)),
        (database, range(9, 11)),
    ):
        tracker = open_tracker(uri, tmp_path / "run", Warnings())
        log_steps(tracker, steps)
        tracker.log_tags({"last_step": str(steps[-1])})
        tracker.close("FINISHED")
        sent.append((tracker.run_id, tracker._delivery.num_bytes))
        assert_complete(uri, str(tracker.run_id), steps[-1])
    size = (tmp_path / "run/tracking/points.jsonl").stat().st_size
    assert sent[2][0] == sent[0][0] != sent[1][0] and sent[0][1] + sent[2][1] == size
    (run,) = all_runs(database)
    assert (run.info.status, run.data.tags["last_step"]) == ("FINISHED", "10")


@pytest.mark.long
def test_a_kill_before_the_cursor_is_noted_delivers_nothing_twice(database: str, tmp_path: Path) -> None:
    """Also where each value, file and status is sent again from the beginning, or from before the last changes."""
    for last_step in (5, 10, 15):
        tracker = open_tracker(database, tmp_path / "run")
        tracker.log_params({"seed": 0})
        tracker.log_tags({"last_step": str(last_step)})
        tracker.log_artifact_text("config.yaml", f"last: {last_step}")
        tracker.log_data_set(DataSetInput(name="shards", digest="0" * 64, source="shards"))
        log_steps(tracker, range(1, last_step + 1))
        tracker.close("FINISHED")
        assert_complete(database, str(tracker.run_id), last_step)
        tracker._delivery.advance(offset=0, revision=last_step // 10)
    (run,) = all_runs(database)
    assert len(run.inputs.dataset_inputs) == 1
    assert (run.info.status, run.data.params, run.data.tags["last_step"]) == ("FINISHED", {"seed": "0"}, "15")
    assert [path.read_text() for path in (tmp_path / "mlruns").rglob("config.yaml")] == ["last: 15"]


def test_without_its_run_json_a_folder_is_sent_whole_to_a_new_run(database: str, tmp_path: Path) -> None:
    """As the messages advise where the run was deleted, or run.json is damaged."""
    first = open_tracker(database, tmp_path / "run")
    log_steps(first, range(1, 6))
    first.close("FINISHED")
    connect(database).delete_run(str(first.run_id))
    (tmp_path / "run/tracking/run.json").unlink()
    second = open_tracker(database, tmp_path / "run")
    log_steps(second, range(6, 9))
    second.close("FINISHED")
    assert second.run_id != first.run_id
    assert_complete(database, str(second.run_id), 8)


def test_a_run_and_a_login_node_that_send_to_one_server_share_its_cursor(database: str, tmp_path: Path) -> None:
    tracker = open_tracker(database, tmp_path / "run")
    log_steps(tracker, range(1, 11))
    for _ in range(2):
        list(sync(tmp_path / "run", database, pytest.fail))
    log_steps(tracker, range(11, 21))
    tracker.close("FINISHED")
    (synced,) = sync(tmp_path / "run", database, pytest.fail)
    assert (synced.run_id, synced.num_bytes, synced.status) == (tracker.run_id, 0, "FINISHED")
    assert len(list((tmp_path / "run/tracking/cursors").iterdir())) == 1
    assert_complete(database, synced.run_id, 20)


def test_no_secret_reaches_server_or_disk(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "open-sesame")
    tracker = open_tracker(database, tmp_path / "run")
    tracker.log_params({"data": {"shards": "https://me:pass1word@host/shards"}, "note": "open-sesame"})
    tracker.log_tags({"from": "s3://me:pass1word@bucket/x"})
    tracker.log_artifact_text("config.yaml", "shards: https://me:pass1word@host/shards\npassword: open-sesame\n")
    tracker.close("FINISHED")
    held = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    held += [path.read_bytes() for path in (tmp_path / "mlruns").rglob("*") if path.is_file()]
    held.append((tmp_path / "mlflow.db").read_bytes())
    assert len(held) > 4
    assert not any(b"pass1word" in data or b"open-sesame" in data for data in held)


def test_a_plain_path_as_address_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="sqlite:///"):
        open_tracker("./mlruns", tmp_path / "run")


def test_a_server_that_is_away_is_reported_once(tmp_path: Path) -> None:
    told = Warnings()
    tracker = open_tracker("http://127.0.0.1:1", tmp_path / "run", told)
    log_steps(tracker, range(1, 1001))
    assert (tmp_path / "run/tracking/points.jsonl").read_bytes().count(b"\n") == 1000
    assert tracker.run_id is None
    wait_until(lambda: bool(told))
    tracker.close("FINISHED", timeout_seconds=0.5)
    assert len(told) == 2 and "Training continues" in told[0] and "points.jsonl" in told[1]


@pytest.mark.long
def test_a_half_made_database_stops_nothing_and_gets_all_once_it_is_whole(empty_database: Path, tmp_path: Path) -> None:
    told = Warnings()
    uri = half_made_database(tmp_path / "half.db")
    tracker = open_tracker(uri, tmp_path / "run", told)
    log_steps(tracker, range(1, 4))
    wait_until(lambda: bool(told))
    assert tracker.run_id is None and "MLflow cannot open" in told[0]
    shutil.copy(empty_database, tmp_path / "half.db")
    tracker.close("FINISHED")
    assert len(told) == 2 and "works again" in told[1]
    assert_complete(uri, tracker.run_id, 3)


def test_a_full_disk_is_reported_once_and_stops_nothing(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Warnings()
    tracker = open_tracker(database, tmp_path / "run", told)

    def refuse(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)
        log_steps(tracker, range(1, 6))
    assert len(told) == 1 and "No space left" in told[0]
    log_steps(tracker, range(6, 9))
    tracker.close("FINISHED")
    assert_complete(database, tracker.run_id, 8)


@pytest.mark.long
def test_ten_thousand_points_go_in_batches_of_what_the_server_takes(database: str, tmp_path: Path) -> None:
    tracker = open_tracker(database, tmp_path / "run")
    log_steps(tracker, range(1, 5001))
    tracker.close("KILLED", timeout_seconds=120)
    assert len(history(database, tracker.run_id, KEYS[0])) == 5000


def test_the_null_tracker_takes_everything_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tracker = NullTracker()
    tracker.log(1, {"a": 1.0})
    tracker.log_params({"a": 1})
    tracker.close("FINISHED")
    assert tracker.run_id is None and not list(tmp_path.iterdir())


@pytest.mark.long
def test_without_mlflow_points_are_kept_and_sent_later(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Warnings()
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "mlflow", None)  # as an import of what is not installed
        tracker = open_tracker(database, tmp_path / "a run", told)
        log_steps(tracker, range(1, 4))
        tracker.log_artifact_text("config.yaml", "kept")
        started_at = time.monotonic()
        tracker.close("FINISHED", timeout_seconds=600.0)
        assert time.monotonic() - started_at < 300.0, "there is nothing to wait for"
        assert tracker.run_id is None and not tracker.server_answers
        with pytest.raises(MlflowNotInstalled, check=coded("mlflow-missing"), match="Fix: pip install"):
            list(sync(tmp_path / "a run", database, told))
    (warning,) = told
    assert warning.startswith("mlflow is not installed (pip install 'mlflow>=")
    assert f"clozeworks sync-tracking '{tmp_path}/a run'" in warning and warning.endswith(tracker.view_hint)
    (synced,) = sync(tmp_path / "a run", database, told)
    assert (synced.status, synced.num_artifacts, len(told)) == ("FINISHED", 1, 1)
    assert_complete(database, synced.run_id, 3)
    resumed = open_tracker(database, tmp_path / "a run")
    log_steps(resumed, range(4, 6))
    resumed.close("FINISHED")
    assert resumed.run_id == synced.run_id
    assert_complete(database, synced.run_id, 5)
