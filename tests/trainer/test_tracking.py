"""Tracking against real MLflow stores: every point once and in order, and a training that never waits."""

from __future__ import annotations

import http.server
import math
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_prep.errors import UsageError
from trainer.mlflow_server import connect
from trainer.settings.watching import TrackingSettings
from trainer.tracking import NullTracker, Tracker, describe_environment, flatten, git_revision

KEYS = ("train/loss", "train/learning_rate")


class Warnings(list[str]):
    """Collects what a tracker tells."""

    def __call__(self, message: str) -> None:
        self.append(message)


def open_tracker(uri: str | None, output_dir: Path, warn: Callable[[str], None] | None = None, **more: Any) -> Tracker:
    settings = TrackingSettings(uri=uri, **more)
    return Tracker.open(settings, output_dir, pytest.fail if warn is None else warn, patience_seconds=5.0)


def log_steps(tracker: Tracker, steps: range) -> None:
    for step in steps:
        tracker.log(step, {key: step / 3 for key in KEYS})


def history(uri: str, run_id: str, key: str) -> list[tuple[int, float]]:
    points = connect(uri).get_metric_history(run_id, key)
    return [(point.step, point.value) for point in points]


def assert_complete(uri: str, run_id: str, last_step: int) -> None:
    for key in KEYS:
        assert history(uri, run_id, key) == [(step, step / 3) for step in range(1, last_step + 1)]


def all_runs(uri: str) -> list[Any]:
    client = connect(uri)
    return client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])


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


def test_a_resumed_run_goes_on_and_repeats_no_step(database: str, tmp_path: Path) -> None:
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


def test_what_was_not_sent_before_a_kill_is_sent_by_the_next_start(database: str, tmp_path: Path) -> None:
    killed = open_tracker(database, tmp_path / "run")
    log_steps(killed, range(1, 11))
    killed._deadline = 0.0
    killed._closing.set()
    killed._thread.join()
    killed._spool.deliver(sent_bytes=0, run_id=None)  # the server had them, but the kill came before that was noted
    with open(tmp_path / "run/tracking/points.jsonl", "ab") as file:
        file.write(b'{"t":1,"s":11,"m":{"train/lo')
    resumed = open_tracker(database, tmp_path / "run")
    log_steps(resumed, range(9, 16))
    resumed.close("FINISHED")
    assert len(all_runs(database)) == 1
    assert_complete(database, resumed.run_id, 15)


def test_a_value_that_mlflow_refuses_holds_up_no_other(database: str, tmp_path: Path) -> None:
    told = Warnings()
    tracker = open_tracker(database, tmp_path / "run", told)
    tracker.log(1, {"good": 1.0, "bad key!": 2.0, "not a number": math.nan, "infinite": math.inf, "last": 3.0})
    tracker.close("FINISHED")
    metrics = connect(database).get_run(tracker.run_id).data.metrics
    assert metrics["good"] == 1.0 and metrics["last"] == 3.0 and math.isnan(metrics["not a number"])
    assert len(told) == 1 and "bad key!" in told[0]


def test_a_deleted_run_is_told_and_gets_its_points_once_it_is_restored(database: str, tmp_path: Path) -> None:
    tracker = open_tracker(database, tmp_path / "run")
    log_steps(tracker, range(1, 6))
    tracker.close("KILLED")
    connect(database).delete_run(tracker.run_id)
    told = Warnings()
    resumed = open_tracker(database, tmp_path / "run", told)
    log_steps(resumed, range(6, 11))
    resumed.close("FINISHED", timeout_seconds=0.2)
    assert "was deleted" in told[0] and f"runs restore --run-id {tracker.run_id}" in told[0]
    assert "points.jsonl" in told[-1]
    connect(database).restore_run(tracker.run_id)
    again = open_tracker(database, tmp_path / "run")
    again.close("FINISHED")
    assert_complete(database, tracker.run_id, 10)
    assert len(all_runs(database)) == 1


def test_a_deleted_experiment_is_told_with_its_remedies(database: str, tmp_path: Path) -> None:
    client = connect(database)
    client.delete_experiment(client.create_experiment("gone"))
    told = Warnings()
    tracker = open_tracker(database, tmp_path / "run", told, experiment="gone")
    log_steps(tracker, range(1, 4))
    tracker.close("FINISHED", timeout_seconds=0.2)
    assert tracker.run_id is None
    assert "experiment 'gone' was deleted" in told[0] and "tracking.experiment" in told[0]
    assert (tmp_path / "run/tracking/points.jsonl").read_text().count("\n") == 3


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


def test_a_server_that_is_away_costs_no_time_and_is_told_once(tmp_path: Path) -> None:
    told = Warnings()
    started_at = time.monotonic()
    tracker = open_tracker("http://127.0.0.1:1", tmp_path / "run", told)
    log_steps(tracker, range(1, 1001))
    assert time.monotonic() - started_at < 10.0  # mlflow's import and one refused connection
    assert tracker.run_id is None
    tracker.close("FINISHED", timeout_seconds=0.5)
    assert len(told) == 2 and "Training goes on" in told[0] and "points.jsonl" in told[1]


def test_a_server_that_answers_errors_or_nothing_holds_up_nobody(tmp_path: Path) -> None:
    class Broken(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            if "hang" in tracker_name:
                hanging.wait(20)
            self.send_error(500)

        do_GET = do_POST = answer

        def log_message(self, *arguments: object) -> None:
            pass

    hanging = threading.Event()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Broken) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for tracker_name in ("errors", "hang"):
            told = Warnings()
            started_at = time.monotonic()
            uri = f"http://me:pass1word@127.0.0.1:{server.server_port}"
            tracker = Tracker.open(TrackingSettings(uri=uri), tmp_path / tracker_name, told, patience_seconds=0.5)
            log_steps(tracker, range(1, 101))
            tracker.close("FAILED", timeout_seconds=0.5)
            assert time.monotonic() - started_at < 6.0
            assert (tmp_path / tracker_name / "tracking/points.jsonl").read_text().count("\n") == 100
            assert "pass1word" not in " ".join(told) + (tmp_path / tracker_name / "tracking/run.json").read_text()
        hanging.set()
        server.shutdown()


def test_a_full_disk_is_told_once_and_stops_nothing(
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


def test_ten_thousand_points_take_little_time_of_the_loop(database: str, tmp_path: Path) -> None:
    tracker = open_tracker(database, tmp_path / "run")
    started_at = time.thread_time()
    log_steps(tracker, range(1, 5001))
    assert time.thread_time() - started_at < 1.0  # about 0.05 s: 10 microseconds a step
    tracker.close("KILLED", timeout_seconds=30)
    assert len(history(database, tracker.run_id, KEYS[0])) == 5000


def test_parameters_are_flat_text() -> None:
    values = {"a": {"b": [1, 2], "c": {}}, "d": 1e-4, "e": "x" * 7000, "f": True}
    flat = flatten(values)
    assert {name: flat[name] for name in ("a.b", "a.c", "d", "f")} == {
        "a.b": "[1, 2]",
        "a.c": "{}",
        "d": "0.0001",
        "f": "true",
    }
    assert len(flat["e"]) == 6000


def test_the_environment_is_versions_and_no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SECRET", "open-sesame")
    environment = describe_environment()
    assert environment["python"].startswith("3.") and "torch" in environment
    assert "open-sesame" not in str(environment)


def test_a_folder_outside_a_repository_has_no_revision(tmp_path: Path) -> None:
    assert git_revision(tmp_path) is None


def test_the_null_tracker_takes_everything_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tracker = NullTracker()
    tracker.log(1, {"a": 1.0})
    tracker.log_params({"a": 1})
    tracker.close("FINISHED")
    assert tracker.run_id is None and not list(tmp_path.iterdir())


def wait_until(condition: Callable[[], bool], timeout_seconds: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing came in time"
        time.sleep(0.05)


@pytest.mark.spawn
def test_a_server_killed_in_the_middle_has_every_point_once_after_its_restart(
    mlflow_server: Any, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    server = mlflow_server
    uri = server.uri.replace("://", "://me:pass1word@")
    monkeypatch.setattr("trainer.tracking.FLUSH_SECONDS", 0.1)
    told = Warnings()
    tracker = open_tracker(uri, tmp_path / "run", told)
    tracker.log_params({"seed": 0})
    tracker.log_artifact_text("config/resolved.yaml", "seed: 0\n")
    log_steps(tracker, range(1, 501))
    wait_until(lambda: not tracker._spool.unsent_bytes)
    server.kill()
    started_at = time.monotonic()
    log_steps(tracker, range(501, 1001))
    assert time.monotonic() - started_at < 2.0
    wait_until(lambda: bool(told))
    tracker.close("KILLED", timeout_seconds=1.0)

    resumed = open_tracker(uri, tmp_path / "run", told)  # a restart of the training while the server is away
    log_steps(resumed, range(901, 1101))
    server.start()
    resumed.log_artifact_text("late.txt", "sent when the server is back")
    resumed.close("FINISHED", timeout_seconds=30.0)
    assert resumed.run_id == tracker.run_id
    assert [run.info.run_id for run in all_runs(database)] == [tracker.run_id]
    assert all_runs(database)[0].info.status == "FINISHED"
    assert_complete(database, tracker.run_id, 1100)
    files = {path.name for path in (tmp_path / "artifacts").rglob("*") if path.is_file()}
    assert files == {"resolved.yaml", "late.txt"}
    printed = capsys.readouterr().out  # MLflow would print the run's address as the training ends
    assert "pass1word" not in printed + "".join(told)
    assert resumed.run_id in resumed.view_hint and "pass1word" not in resumed.view_hint
