"""`clozeworks compare` reads runs by their status and groups them by label."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_prep.base.errors import UserError
from launch import compare
from tests.support.error_codes import coded
from trainer.tracking.status import State, write_status

FACTS = dict.fromkeys(("mlm_probability", "mask_unit", "seed", "sequence_length", "rows", "valid_split"), "1")


def run_of(folder: Path, loss: float, rows: str = "1", state: State = "finished") -> Path:
    folder.mkdir()
    values = {"step": 5, "max_steps": 5, "tokens_seen": 100, "skipped_steps": 0, "world_size": 1}
    facts = {**FACTS, "tokenizer": "a", "rows": rows}
    write_status(folder, state, values | {"metrics": {"valid/mlm_loss": loss}, "evaluation": facts})
    return folder


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["compare.py", *arguments])
    compare.main()


def test_groups_of_runs_are_compared_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = [run_of(tmp_path / f"old-{n}", 3.0 + n / 10) for n in range(2)]
    new = [run_of(tmp_path / f"new-{n}", 2.0 + n / 20) for n in range(2)]
    output = tmp_path / "out"
    command(monkeypatch, *(f"{name}={a},{b}" for name, (a, b) in (("old", old), ("new", new))), "--output", str(output))
    out = capsys.readouterr().out
    assert "minus old" in out and "2 and 2 runs" in out and "better" in out
    values = json.loads((output / "comparison.json").read_text())
    assert values["scores"][1]["difference"] == pytest.approx(-1.025)
    assert "| valid/mlm\\_loss | lower | new |" in (output / "comparison.md").read_text()
    assert (output / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_a_path_with_an_equals_sign_is_a_path(tmp_path: Path) -> None:
    assert compare.names_in(str(run_of(tmp_path / "lr=1", 3.0))) == [(None, str(tmp_path / "lr=1"))]
    assert compare.names_in("a=b,c") == [("a", "b"), ("a", "c")]
    assert compare.names_in("models:/n@x") == [(None, "models:/n@x")]
    for text in ("a=", "=b", "a=,"):
        with pytest.raises(UserError, check=coded("invalid-group")):
            compare.names_in(text)


@pytest.mark.parametrize("arguments", [["{old}", "{old}/nothing"], ["a={old},{old}/nothing", "b={old}"]])
def test_what_is_no_run_and_no_model_is_named(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = run_of(tmp_path / "old", 3.0)
    with pytest.raises(UserError, match="nothing"):
        command(monkeypatch, *(each.format(old=old) for each in arguments))


def test_one_run_is_nothing_to_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, check=coded("nothing-to-compare")):
        command(monkeypatch, str(run_of(tmp_path / "old", 3.0)))


def test_a_run_that_may_still_change_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped, other = run_of(tmp_path / "stopped", 3.0, state="stopped"), run_of(tmp_path / "other", 2.0)
    command(monkeypatch, str(stopped), str(other))
    out = capsys.readouterr().out
    assert f"{stopped} has not finished" in out and f"{other} has not finished" not in out
