"""Faults of the MLflow server while a training goes on: it waits for nothing, and every point arrives once."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import fork_server
from tests.support.fault_proxy import Fault, run_proxy
from tests.support.mlflow_servers import Server
from tests.support.tracked_runs import Warnings, all_runs, assert_complete, log_steps, open_tracker, wait_until
from trainer.tracking.mlflow_server import connect
from trainer.tracking.sync import sync

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_STEPS = 400
SECRETS = {
    "MLFLOW_TRACKING_PASSWORD": "hunter2-hunter2",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI-K7MDENG",
    "AWS_SESSION_TOKEN": "session-token-9f8e7d",
    "HF_TOKEN": "hf_abcdefghijklmnop",
}
URL_PASSWORD = "pass1word"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deliveries are tried again soon."""
    monkeypatch.setattr("trainer.tracking.tracker.FLUSH_SECONDS", 0.05)
    monkeypatch.setattr("trainer.tracking.tracker.MAX_BACKOFF_SECONDS", 0.5)


def runs_of(server: Server, experiment: str) -> list[Any]:
    client = connect(server.database)
    found = client.get_experiment_by_name(experiment)
    return client.search_runs([found.experiment_id]) if found else []


def is_write(request: Any) -> bool:
    return request.method == "POST" and request.target.endswith(("/runs/log-batch", "/runs/create"))


@pytest.mark.fault(
    row="32",
    fault="the MLflow server answers 500, breaks connections, loses answers or is slow",
    required="training does not wait; every point arrives later, in order, once, also after a restart",
)
@pytest.mark.parametrize(
    "fault",
    [
        Fault("refuse", status=500),
        Fault("reset"),
        Fault("lose_answer", times=3, concerns=is_write),
        Fault("slow", seconds=1.0, times=4),
    ],
    ids=lambda fault: fault.kind,
)
def test_row_32_a_server_in_trouble_gets_every_point_once(
    fault: Fault, server: Server, tmp_path: Path, impatient: None, observed: Callable[..., None]
) -> None:
    with run_proxy(server.uri) as proxy:
        proxy.faults = [fault]
        told, experiment = Warnings(), f"trouble-{fault.kind}"
        tracker = open_tracker(proxy.endpoint, tmp_path / "run", told, patience=0.0, experiment=experiment)
        log_steps(tracker, range(1, NUM_STEPS + 1))
        # All steps are on disk before the server has taken the first: nobody waited for it.
        assert (tmp_path / "run/tracking/points.jsonl").read_bytes().count(b"\n") == NUM_STEPS
        assert tracker._delivery.cursor.offset == 0
        wait_until(lambda: fault.happened > 0)
        tracker.close("KILLED", timeout_seconds=0.1)
        tracker._thread.join(120)  # which ends with its process, where there is one
        assert not tracker._thread.is_alive()

        resumed = open_tracker(proxy.endpoint, tmp_path / "run", told, patience=0.0, experiment=experiment)
        log_steps(resumed, range(NUM_STEPS - 50, NUM_STEPS + 101))
        proxy.faults = []
        resumed.close("FINISHED", timeout_seconds=120.0)
    (run,) = runs_of(server, experiment)
    assert run.info.status == "FINISHED"
    assert_complete(server.database, run.info.run_id, NUM_STEPS + 100)
    observed(f"{fault.kind} ({fault.happened} requests): all {NUM_STEPS + 100} points arrived, in order, once")


@pytest.mark.fault(
    row="32",
    fault="the MLflow server is killed in the middle and comes back later",
    required="training does not wait; every point arrives later, in order, once; also after a restart of the training",
)
def test_row_32_a_server_killed_in_the_middle_has_every_point_once_after_its_restart(
    mlflow_server: Any, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    server = mlflow_server
    uri = server.uri.replace("://", "://me:pass1word@")
    monkeypatch.setattr("trainer.tracking.tracker.FLUSH_SECONDS", 0.1)
    told = Warnings()
    tracker = open_tracker(uri, tmp_path / "run", told)
    tracker.log_params({"seed": 0})
    tracker.log_artifact_text("config/resolved.yaml", "seed: 0\n")
    log_steps(tracker, range(1, 501))
    wait_until(lambda: not tracker._delivery.unsent_bytes)
    server.kill()
    log_steps(tracker, range(501, 1001))
    assert (tmp_path / "run/tracking/points.jsonl").read_bytes().count(b"\n") == 1000
    wait_until(lambda: bool(told))
    tracker.close("KILLED", timeout_seconds=0.1)

    resumed = open_tracker(uri, tmp_path / "run", told)  # a restart of the training while the server is away
    log_steps(resumed, range(901, 1101))
    server.start()
    resumed.log_artifact_text("late.txt", "sent when the server is back")
    resumed.close("FINISHED", timeout_seconds=120.0)
    assert resumed.run_id == tracker.run_id
    assert [run.info.run_id for run in all_runs(database)] == [tracker.run_id]
    assert all_runs(database)[0].info.status == "FINISHED"
    assert_complete(database, tracker.run_id, 1100)
    files = {path.name for path in (tmp_path / "artifacts").rglob("*") if path.is_file()}
    begun = {name for name in files if name.startswith(".artifact.uploading.")}  # the killed server's own, hidden by it
    assert files - begun == {"resolved.yaml", "late.txt"}
    printed = capsys.readouterr().out  # MLflow would print the run's address as the training ends
    assert "pass1word" not in printed + "".join(told)
    assert resumed.run_id in resumed.view_hint and "pass1word" not in resumed.view_hint


@pytest.mark.fault(
    row="32",
    fault="the compute node reaches no server at all, from the start to the end",
    required="every point arrives later, in order, once: `clozeworks sync-tracking` sends the folder from elsewhere",
)
def test_row_32_a_login_node_sends_what_a_compute_node_could_not(
    server: Server, tmp_path: Path, impatient: None
) -> None:
    told = Warnings()
    run = {"experiment": "offline"}
    tracker = open_tracker("http://127.0.0.1:1", tmp_path / "run", told, patience=0.0, **run)
    tracker.log_params({"seed": 0})
    tracker.log_artifact_text("config.yaml", "seed: 0\n")
    log_steps(tracker, range(1, 101))
    sent = list(sync(tmp_path / "run", server.uri, told))  # while the training goes on
    assert [(each.num_artifacts, each.status) for each in sent] == [(1, "RUNNING")]
    assert_complete(server.database, sent[0].run_id, 100)
    log_steps(tracker, range(101, 151))
    tracker.log_artifact_text("late.txt", "later")
    tracker.close("FINISHED", timeout_seconds=0.1)
    with run_proxy(server.uri) as proxy:
        proxy.faults = [Fault("lose_answer", times=2, concerns=is_write)]
        again = list(sync(tmp_path / "run", proxy.endpoint, told))  # at another address: all of it once more
    assert [each.run_id for each in again] == [sent[0].run_id]
    (found,) = runs_of(server, "offline")
    assert (found.info.status, found.data.params) == ("FINISHED", {"seed": "0"})
    assert_complete(server.database, found.info.run_id, 150)
    list(sync(tmp_path / "run", server.uri, told))
    assert [(each.num_bytes, each.num_artifacts) for each in sync(tmp_path / "run", server.uri, told)] == [(0, 0)]
    assert len(runs_of(server, "offline")) == 1


@pytest.mark.fault(
    row="33",
    fault="the MLflow run was deleted meanwhile",
    required="clear message; training goes on; nothing lost on disk",
)
def test_row_33_a_deleted_run_is_told_and_gets_its_points_once_it_is_restored(database: str, tmp_path: Path) -> None:
    tracker = open_tracker(database, tmp_path / "run")
    log_steps(tracker, range(1, 6))
    tracker.close("KILLED")
    connect(database).delete_run(tracker.run_id)
    told = Warnings()
    resumed = open_tracker(database, tmp_path / "run", told)
    log_steps(resumed, range(6, 11))
    wait_until(lambda: bool(told))
    resumed.close("FINISHED", timeout_seconds=0.2)
    assert "was deleted" in told[0] and f"runs restore --run-id {tracker.run_id}" in told[0]
    assert "points.jsonl" in told[-1]
    connect(database).restore_run(tracker.run_id)
    again = open_tracker(database, tmp_path / "run")
    again.close("FINISHED")
    assert_complete(database, tracker.run_id, 10)
    assert len(all_runs(database)) == 1


@pytest.mark.fault(
    row="33",
    fault="the experiment of that name was deleted",
    required="clear message; training goes on; nothing lost on disk",
)
def test_row_33_a_deleted_experiment_is_told_with_its_remedies(database: str, tmp_path: Path) -> None:
    client = connect(database)
    client.delete_experiment(client.create_experiment("gone"))
    told = Warnings()
    tracker = open_tracker(database, tmp_path / "run", told, experiment="gone")
    log_steps(tracker, range(1, 4))
    wait_until(lambda: bool(told))
    tracker.close("FINISHED", timeout_seconds=0.2)
    assert tracker.run_id is None
    assert "experiment 'gone' was deleted" in told[0] and "tracking.experiment" in told[0]
    assert (tmp_path / "run/tracking/points.jsonl").read_text().count("\n") == 3


@pytest.mark.spawn
@pytest.mark.fault(
    row="47",
    fault="passwords in the server's URL, in the environment and in the configuration of a real training",
    required="in no log, run, artifact, error or saved config",
)
@pytest.mark.slow
def test_row_47_no_secret_of_a_training_is_kept_anywhere(server: Server, small_shards: Path, tmp_path: Path) -> None:
    uri = server.uri.replace("://", f"://me:{URL_PASSWORD}@")
    config = tmp_path / "secret.yaml"
    config.write_text(
        f"""
output_dir: {tmp_path}/run
model: {{vocab_size: 800, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 64,
         max_position_embeddings: 64}}
data: {{shards: {small_shards}, sequence_length: 64, num_workers: 0}}
training: {{max_steps: 3, global_batch_tokens: 256, micro_batch_tokens: 256, precision: fp32}}
tracking: {{uri: "{uri}", experiment: secrets, run_name: "https://me:{URL_PASSWORD}@host/run"}}
registry: {{name: secretive, promote_to: champion}}
storage_options: {{"s3://bucket": {{key: AKIA1234567890, secret: "{SECRETS["AWS_SECRET_ACCESS_KEY"]}"}}}}
"""
    )
    answer = pretrain(tmp_path, "--config", str(config))
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "registered step 3 as secretive version 1" in answer.stdout
    assert_no_secret("what was printed", (answer.stdout + answer.stderr).encode())
    list(sync(tmp_path / "run", uri, Warnings()))  # what a slow machine had no time for at the end
    assert [run.info.status for run in runs_of(server, "secrets")] == ["FINISHED"]
    kept = [path for folder in (tmp_path / "run", server.folder) for path in folder.rglob("*") if path.is_file()]
    assert {"run.json", "config.yaml", "state.json", "mlflow.db"} <= {path.name for path in kept}
    for path in kept:
        assert_no_secret(str(path), path.read_bytes())

    config.write_text(config.read_text().replace(uri, f"ftp://me:{URL_PASSWORD}@host"))
    refused = pretrain(tmp_path, "--config", str(config))
    assert refused.returncode != 0 and "Traceback" not in refused.stderr
    assert_no_secret("the error", (refused.stdout + refused.stderr).encode())


def pretrain(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | SECRETS | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"PYTHONPATH": str(REPOSITORY)}
    return fork_server.run([str(REPOSITORY / "launch" / "pretrain.py"), *arguments], folder, environment)


def assert_no_secret(where: str, data: bytes) -> None:
    for secret in (URL_PASSWORD, *SECRETS.values()):
        assert secret.encode() not in data, f"{secret} is in {where}"
