"""The command that registers: from a folder or checkpoint to an alias that fills a mask."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from data_prep.base.errors import UsageError, UserError
from launch import register
from tests.support.error_codes import coded
from trainer.config.comparability import facts_of_metric
from trainer.registry.model_versions import NotPromoted
from trainer.registry.served_model import ServedModel
from trainer.tracking.mlflow_server import connect


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["register.py", *arguments])
    register.main()


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.mark.long
def test_a_folder_becomes_a_version_under_its_alias(
    tiny_hugging_face: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exported: list[Path] = []

    def export_checkpoint(checkpoint: Path, output: Path) -> None:
        exported.append(checkpoint)
        shutil.copytree(tiny_hugging_face, output)

    monkeypatch.setattr("trainer.hf_export.export.export_checkpoint", export_checkpoint)
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


def test_a_dry_run_refuses_what_a_registration_would(
    tiny_hugging_face: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_hugging_face, tmp_path / "model")
    (tmp_path / "model" / "notes #1.txt").write_text("x")
    with pytest.raises(UserError, check=coded("unreadable-file-name")):
        run(monkeypatch, "--model", "model", "--name", "birds", "--dry-run")
    with pytest.raises(UsageError, check=coded("invalid-model-name")):
        run(monkeypatch, "--model", "model", "--name", "birds #1", "--dry-run")


def test_names_are_checked_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="--alias"):
        run(monkeypatch, "--checkpoint", "nowhere", "--name", "birds", "--alias", "latest")


def test_an_alias_that_no_promotion_moves_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(register, "register_folder", pytest.fail)
    for alias, message in (("previous", "--promote previous"), ("latest", "'latest' is not a valid alias")):
        with pytest.raises(UsageError, match=message):
            run(monkeypatch, "--model", "nowhere", "--name", "birds", "--promote", alias)


def test_a_folder_that_is_no_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="config.json"):
        run(monkeypatch, "--model", str(tmp_path), "--name", "birds")


@pytest.mark.parametrize(
    "arguments", [(), ("--name", "x"), ("--list",), ("--model", "m", "--checkpoint", "c", "--name", "x")]
)
def test_one_source_and_a_name_are_required(monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, *arguments)
    assert stopped.value.code == 2


@pytest.mark.long
def test_a_version_is_promoted_past_its_gate_and_listed(
    tiny_hugging_face: Path,
    database: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    client = connect(database)
    client.create_registered_model("birds")
    for loss in (2.5, 3.0):
        tags = {"clozeworks.scores.valid/mlm_loss": str(loss), "clozeworks.data_lineage": "a" * 64}
        tags |= {f"clozeworks.evaluation.{name}": "same" for name in facts_of_metric("valid/mlm_loss")}
        client.create_model_version("birds", f"file://{tmp_path}/nothing", tags=tags)
    gate = ("--promote", "champion", "--if", "valid/mlm_loss < champion")
    run(monkeypatch, "--name", "birds", "--version", "1", *gate)
    assert "champion of birds is now version 1: no version has the alias champion yet" in capsys.readouterr().out
    with pytest.raises(NotPromoted, match="3 is not < 2.5 of champion") as refused:
        run(monkeypatch, "--name", "birds", "--version", "2", *gate)
    assert refused.value.exit_status == 3
    client.set_model_version_tag("birds", "2", "clozeworks.evaluation.seed", "1")
    client.set_model_version_tag("birds", "2", "clozeworks.scores.valid/mlm_loss", "2.0")
    with pytest.raises(NotPromoted, match="evaluation.seed 1 and same", check=coded("evaluations-differ")) as different:
        run(monkeypatch, "--name", "birds", "--version", "2", *gate)
    assert different.value.exit_status == 3
    run(monkeypatch, "--name", "birds", "--list")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[1].split()[:2] == ["1", "champion"]
    run(monkeypatch, "--name", "birds", "--trained-on", "a" * 12)
    assert "2 versions of birds trained on aaaaaaaaaaaa" in capsys.readouterr().out
    run(monkeypatch, "--name", "birds", "--trained-on", "b" * 12)
    assert "0 versions of birds trained on" in capsys.readouterr().out
    run(monkeypatch, "--trained-on", "a" * 12)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 versions of all registered models trained on")
    assert [line.split()[:2] for line in lines[2:]] == [["birds", "1"], ["birds", "2"]]
    run(monkeypatch, "--name", "birds", "--version", "2", *gate, "--allow-different-evaluation")
    assert "champion of birds is now version 2" in capsys.readouterr().out


@pytest.mark.long
def test_a_model_that_fails_the_gate_is_registered_and_not_promoted(
    tiny_hugging_face: Path,
    database: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = Path(shutil.copytree(tiny_hugging_face, tmp_path / "model"))
    (model / "provenance.json").write_text('{"scores": {"valid/mlm_loss": 3.0}}')
    promoted = ("--model", str(model), "--name", "birds", "--promote", "champion", "--if")
    with pytest.raises(UsageError, match="mlm_loss, which the model does not have"):
        run(monkeypatch, *promoted, "mlm_loss < 2")
    assert not connect(database).search_registered_models(), "a slip of the pen registers nothing"
    with pytest.raises(NotPromoted, match="valid/mlm_loss 3 is not < 2"):
        run(monkeypatch, *promoted, "valid/mlm_loss < 2")
    assert "registered birds version 1" in capsys.readouterr().out
    assert connect(database).get_registered_model("birds").aliases == {}


@pytest.mark.parametrize(
    "arguments",
    [
        ("--model", "m", "--if", "a < 1"),
        ("--version", "1"),
        ("--list", "--alias", "a"),
        ("--version", "1", "--promote", "a", "--allow-different-evaluation"),
        ("--model", "m", "--alias", "a", "--promote", "b"),
        ("--list", "--trained-on", "a" * 12),
    ],
)
def test_options_that_contradict_each_other_end_with_status_two(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, "--name", "birds", *arguments)
    assert stopped.value.code == 2


def test_the_example_of_a_model_is_described_by_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    tagged: list[dict[str, object]] = []
    monkeypatch.setattr(ServedModel, "pipeline", lambda self: lambda text: tagged)
    tagger = ServedModel(None, None, "token-classification", "It was a fine day.")
    assert register.answer_lines(tagger) == ["(no word has a tag)"]
    tagged.append({"entity": "B-X", "score": 0.75, "word": "day"})
    assert register.answer_lines(tagger) == ["B-X 0.750  day"]
    reader = ServedModel(None, None, None, "It was a fine day.")
    assert "clozeworks predict" in register.answer_lines(reader)[0]
