"""The command that evaluates a model: its table, its file, and what it refuses before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_prep.base.errors import UsageError, UserError
from launch import evaluate
from tests.support.error_codes import coded
from tests.support.launch_command import run
from trainer.inference.fill_mask import FillMask

PAIRS = [("the cat sat on the mat.", "the cat sat the on mat."), ("the dog ran.", "the dog ran.")]


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    lines = [json.dumps({"sentence_good": good, "sentence_bad": bad, "UID": "order"}) for good, bad in PAIRS]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    return tmp_path


@pytest.mark.parametrize("family", ["tiny_hugging_face", "tiny_eurobert"])
def test_accuracies_are_printed_and_written_with_all_scores(
    request: pytest.FixtureRequest,
    pairs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    family: str,
) -> None:
    model, output = request.getfixturevalue(family), pairs / "scores.json"
    run(monkeypatch, evaluate, "--model", model, "--minimal-pairs", pairs, "--output", output)
    values = json.loads(output.read_text())
    printed = capsys.readouterr().out
    assert f"{100 * values['overall']:.2f}" in printed and "overall" in printed
    assert len(values["interval"]) == 2 and "fewer than 30 pairs" in printed
    assert values["paradigms"] == {"order": values["overall"]} and values["num_ties"] == 1
    assert [(each["sentence_good"], each["sentence_bad"]) for each in values["pairs"]] == PAIRS
    first, tied = values["pairs"]
    assert values["overall"] == (first["score_good"] > first["score_bad"]) / 2
    assert tied["score_good"] == tied["score_bad"] < 0


def test_wrong_arguments_are_refused_before_the_model_is_loaded(
    tiny_hugging_face: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FillMask, "load", lambda folder: pytest.fail("the model was loaded"))
    with pytest.raises(UsageError, check=coded("no-minimal-pairs")):
        run(monkeypatch, evaluate, "--model", tiny_hugging_face, "--minimal-pairs", tmp_path / "none")
    with pytest.raises(UserError, check=coded("invalid-model-address")):
        run(monkeypatch, evaluate, "--model", "models:/english", "--minimal-pairs", tmp_path)


def test_a_suite_prints_its_table_and_a_dry_run_its_plan(
    tiny_hugging_face: Path, pairs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = "{function: minimal_pairs, files: {pairs: pairs.jsonl}, metrics: [accuracy, ties]}"
    (pairs / "suite.yaml").write_text(f"name: order\ntasks: {{order: {task}}}\n")
    options = ["--model", tiny_hugging_face, "--suite", pairs / "suite.yaml", f"data={pairs}", "--no-tracking"]
    monkeypatch.chdir(pairs)
    run(monkeypatch, evaluate, *options, "--dry-run")
    plan = capsys.readouterr().out
    assert "1 evaluations" in plan and "pairs.jsonl" in plan and not (pairs / "evaluations").exists()
    run(monkeypatch, evaluate, *options)
    printed = capsys.readouterr().out
    (folder,) = (pairs / "evaluations").iterdir()
    assert str(folder.relative_to(pairs)) in printed and "ties 1.0000" in printed
    scores = json.loads((folder / "scores.json").read_text())
    assert scores["tasks"]["order"]["seeds"]["0"]["ties"] == 1


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--suite", "none"), "missing-config"),
        (("--suite", "glue", "--precision", "fp32"), "precision-with-suite"),
        (("--suite", "glue", "--tasks", "wnli"), "unknown-task"),
        (("--suite", "glue", "data=none"), "missing-task-file"),
        (("--suite", "glue", "data=none", "--tasks", "cola", "seeds=[0]"), "missing-task-file"),
        (("--minimal-pairs", ".", "--tasks", "cola"), "suite-options-without-suite"),
    ],
)
def test_wrong_options_of_suites_are_refused(
    tiny_hugging_face: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], code: str
) -> None:
    with pytest.raises(UsageError, check=coded(code)):
        run(monkeypatch, evaluate, "--model", tiny_hugging_face, *options)


def test_a_dry_run_counts_the_pairs_and_neither_loads_nor_writes(
    tiny_hugging_face: Path, pairs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FillMask, "load", lambda folder: pytest.fail("the model was loaded"))
    options = ["--model", tiny_hugging_face, "--minimal-pairs", pairs, "--output", pairs / "scores.json", "--dry-run"]
    run(monkeypatch, evaluate, *options)
    assert "2 minimal pairs" in capsys.readouterr().out and not (pairs / "scores.json").exists()


def test_several_models_are_compared_by_another_command(capsys):
    with pytest.raises(SystemExit):
        evaluate.parse_arguments(["--model", "a", "--model", "b", "--minimal-pairs", "pairs"])
    assert "`clozeworks compare`" in capsys.readouterr().err
