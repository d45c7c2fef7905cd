"""The command that registers: from a folder or checkpoint to an alias that fills a mask."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.errors import UsageError, UserError
from launch import register
from trainer.mlflow_server import connect
from trainer.registry import pull

REPOSITORY = Path(__file__).resolve().parents[2]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["register.py", *arguments])
    register.main()


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def test_a_folder_becomes_a_version_under_its_alias(
    tiny_hugging_face: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exported: list[Path] = []

    def export_checkpoint(checkpoint: Path, output: Path) -> None:
        exported.append(checkpoint)
        shutil.copytree(tiny_hugging_face, output)

    monkeypatch.setattr("trainer.export.export_checkpoint", export_checkpoint)
    uri = f"sqlite:///{tmp_path}/chosen.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    run(monkeypatch, "--model", str(tiny_hugging_face), "--name", "birds", "--alias", "champion")
    first = capsys.readouterr().out
    assert "registered birds version 1" in first and "models:/birds@champion" in first and "MODEL: It was a" in first
    run(monkeypatch, "--checkpoint", "run/checkpoints/step-00000001", "--name", "birds", "--alias", "champion")
    assert "registered birds version 2" in capsys.readouterr().out
    assert exported == [Path("run/checkpoints/step-00000001")]
    assert os.environ["MLFLOW_TRACKING_URI"] == uri and not (tmp_path / "mlflow.db").exists()
    client = connect(uri)
    assert client.get_model_version_by_alias("birds", "champion").version == 2


def test_a_dry_run_writes_nothing(
    tiny_hugging_face: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "--model", str(tiny_hugging_face), "--name", "birds", "--dry-run")
    assert "nothing was written" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_names_are_checked_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="--alias"):
        run(monkeypatch, "--checkpoint", "nowhere", "--name", "birds", "--alias", "latest")


def test_a_folder_that_is_no_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="config.json"):
        run(monkeypatch, "--model", str(tmp_path), "--name", "birds")


@pytest.mark.parametrize("arguments", [(), ("--name", "x"), ("--model", "m", "--checkpoint", "c", "--name", "x")])
def test_one_source_and_a_name_are_required(monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, *arguments)
    assert stopped.value.code == 2


@pytest.mark.spawn
def test_two_registrations_at_once_are_both_whole(tiny_hugging_face: Path, tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    connect(uri).search_experiments()  # makes the tables
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    python = [sys.executable, str(REPOSITORY / "launch/register.py"), "--model", str(tiny_hugging_face)]
    command = [*python, "--name", "birds", "--alias", "champion", "--tracking-uri", uri]
    both = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    assert [(process.communicate(timeout=300)[1], process.returncode) for process in both] == [("", 0)] * 2

    for version in (1, 2):
        assert (pull(f"models:/birds/{version}", tmp_path / str(version), uri) / "model.safetensors").is_file()
    command = [sys.executable, str(REPOSITORY / "launch/fill_mask.py"), "--tracking-uri", uri]
    command += ["--model", "models:/birds@champion"]
    answer = subprocess.run([*command, "the [MASK] sat"], env=environment, capture_output=True, text=True, timeout=300)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "MODEL: the" in answer.stdout
