"""Faults on the way from a checkpoint to the registry: nothing half-made stands under a final name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from data_prep.base.errors import UsageError, UserError
from launch import export
from tests.support import fork_server
from tests.support.error_codes import coded
from tests.support.fault_proxy import Fault, Request, run_proxy
from tests.support.launch_command import run
from tests.support.mlflow_servers import Server
from tests.support.toy_run import make_run, make_weights, write_checkpoint
from trainer.checkpoint.format import step_folder
from trainer.inference.pulled_model import pull
from trainer.registry.registration import register
from trainer.tracking.mlflow_server import connect

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.fault(row="37", fault="export of a checkpoint with NaN weights", required="refused")
def test_row_37_a_checkpoint_with_nan_is_not_exported(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    output_dir = make_run(tmp_path / "run", tokenizer_folder)
    weights = make_weights()
    name = next(iter(weights))
    weights[name][0] = float("nan")
    fingerprint = json.loads((tokenizer_folder / "tokenizer_info.json").read_text())["fingerprint"]
    write_checkpoint(output_dir, 30, fingerprint, weights)
    with pytest.raises(UserError, match=name, check=coded("weights-not-finite")):
        run(monkeypatch, export, "--checkpoint", output_dir, "--output", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    run(monkeypatch, export, "--checkpoint", step_folder(output_dir, 20), "--output", tmp_path / "out")


@pytest.mark.fault(row="37", fault="export of a torn checkpoint", required="refused")
@pytest.mark.parametrize("damage", ["flipped byte", "truncated", "missing"])
def test_row_37_a_torn_checkpoint_is_not_exported(
    damage: str, tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output_dir = make_run(tmp_path / "run", tokenizer_folder)
    path = step_folder(output_dir, 20) / "rank-00001-of-00002.safetensors"
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    else:
        content[-1] ^= 1
        path.write_bytes(content if damage == "flipped byte" else content[:-20])
    with pytest.raises(UserError, match="rank-00001-of-00002.safetensors", check=coded("damaged-checkpoint")):
        run(monkeypatch, export, "--checkpoint", output_dir, "--output", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.fault(row="37", fault="export into a folder that is not empty", required="refused")
def test_row_37_an_export_overwrites_nothing(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output_dir = make_run(tmp_path / "run", tokenizer_folder)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, check=coded("output-not-empty")):
        run(monkeypatch, export, "--checkpoint", output_dir, "--output", tmp_path / "out")
    assert [(path.name, path.read_text()) for path in (tmp_path / "out").iterdir()] == [("mine.txt", "mine")]


@pytest.mark.fault(
    row="38",
    fault="the upload of a version breaks in the middle",
    required="no half version under an alias; the same command ends right",
)
@pytest.mark.parametrize(
    "kind", ["reset", pytest.param("cut", marks=pytest.mark.slow), pytest.param("refuse", marks=pytest.mark.slow)]
)
def test_row_38_a_broken_upload_leaves_the_alias_and_the_same_call_ends_right(
    kind: Any, exported: Path, server: Server, desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_in_the_middle(request: Request) -> bool:
        """A weight file that is uploaded, or for `cut` one that is read back."""
        return request.method == ("GET" if kind == "cut" else "PUT") and "model.safetensors" in request.target

    monkeypatch.setattr("trainer.tracking.mlflow_server.UPLOAD_RETRIES", 0)
    name, client = f"upload-{kind}", connect(server.uri)
    with run_proxy(server.uri) as proxy:
        first = register(exported, name, "champion", proxy.endpoint)
        proxy.faults = [Fault(kind, concerns=is_in_the_middle, status=500)]
        with pytest.raises(UserError, match="(?i)no alias was moved"):
            register(exported, name, "champion", proxy.endpoint)
        assert proxy.faults[0].happened
        assert int(client.get_model_version_by_alias(name, "champion").version) == int(first.version)
        assert [int(each.version) for each in client.search_model_versions(f"name='{name}'")] == [int(first.version)]
        proxy.faults = []
        again = register(exported, name, "champion", proxy.endpoint)
        assert int(client.get_model_version_by_alias(name, "champion").version) == int(again.version)
        assert (pull(f"models:/{name}@champion", None, proxy.endpoint) / "model.safetensors").is_file()


@pytest.mark.fault(row="38", fault="the answer to a version's creation is lost", required="one version, not two")
@pytest.mark.parametrize("retries", [0, 2])
def test_row_38_a_version_whose_creation_was_not_answered_is_not_made_twice(
    retries: int, exported: Path, server: Server, desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.tracking.mlflow_server.UPLOAD_RETRIES", retries)
    name, client = f"unanswered-{retries}", connect(server.uri)
    with run_proxy(server.uri) as proxy:
        proxy.faults = [
            Fault("lose_answer", times=1, concerns=lambda request: "model-versions/create" in request.target)
        ]
        registration = register(exported, name, "champion", proxy.endpoint)
        assert proxy.faults[0].happened
    assert [each.version for each in client.search_model_versions(f"name='{name}'")] == [registration.version]
    assert client.get_model_version_by_alias(name, "champion").version == registration.version


@pytest.mark.fault(row="33", fault="the registry refuses a version", required="clear message; nothing lost on disk")
def test_row_33_a_registry_that_refuses_is_told(
    exported: Path, server: Server, desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.tracking.mlflow_server.UPLOAD_RETRIES", 0)
    with run_proxy(server.uri) as proxy:
        proxy.faults = [Fault("refuse", concerns=lambda request: "model-versions/create" in request.target, status=403)]
        with pytest.raises(UserError, match="registering refused .* failed.*rerun the same command"):
            register(exported, "refused", "champion", proxy.endpoint)
    assert not connect(server.uri).search_model_versions("name='refused'")
    assert (exported / "model.safetensors").is_file()


@pytest.mark.spawn
@pytest.mark.fault(
    row="39",
    fault="two registrations of one name at once",
    required="both versions whole; the alias points to one of them",
)
def test_row_39_two_registrations_at_once_are_both_whole(exported: Path, database: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [str(REPOSITORY / "launch/register.py"), "--model", str(exported)]
    command += ["--name", "birds", "--alias", "champion", "--tracking-uri", database]
    both = [fork_server.start(command, Path.cwd(), environment) for _ in range(2)]
    assert [(process.communicate(timeout=1500)[1], process.returncode) for process in both] == [("", 0)] * 2
    for version in (1, 2):
        assert (pull(f"models:/birds/{version}", tmp_path / str(version), database) / "model.safetensors").is_file()
    assert int(connect(database).get_model_version_by_alias("birds", "champion").version) in (1, 2)
    assert (pull("models:/birds@champion", None, database) / "model.safetensors").is_file()
