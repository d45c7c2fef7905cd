"""The rule of exit statuses in launch/README.md: the same error has the same status in every command."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from launch import __main__ as entry

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = [path for folder in ("data_prep", "trainer", "launch") for path in (REPOSITORY / folder).rglob("*.py")]
WRONG = (
    ("unknown-command", "inspekt gone"),
    ("unknown-command", "docstrings"),
    ("usage", "status"),
    ("missing-path", "verify gone"),
    ("missing-path", "inspect gone"),
    ("missing-path", "stats gone"),
    ("missing-path", "remove gone --source web"),
    ("input-not-found", "shards --input gone.txt --tokenizer gone --output new"),
    ("input-not-found", "tokenizer --input gone.txt --output new"),
    ("missing-path", "status gone"),
    ("missing-config", "pretrain --config gone"),
    ("config-without-option", "pretrain mine.yaml"),
    ("unknown-option", "pretrain --config tiny_cpu --learning_rate 1e-4"),
    ("unknown-setting", "pretrain --config tiny_cpu lr=1e-4"),
    ("missing-config", "doctor --config gone"),
    ("missing-config", "benchmark --config gone"),
    ("missing-checkpoint", "export --checkpoint gone --output new"),
    ("missing-path", "average gone --last 2 --output new"),
    ("missing-checkpoint", "register --checkpoint gone --name bert"),
    ("missing-path", "embed --model gone --input gone.txt --output new.npy"),
    ("no-minimal-pairs", "evaluate --model gone --minimal-pairs gone"),
    ("missing-path", "predict --model gone --input gone.tsv --output new.tsv"),
    (
        "missing-path",
        "finetune --model m --task regression --train gone.tsv --text-column a --label-column b --output n",
    ),
    ("missing-output-dir", "sync-tracking gone"),
    ("invalid-hub-name", "push --hub gone --model gone"),
    ("missing-output-dir", "follow gone"),
    ("missing-hostfile", "nodes --hostfile gone -- --config tiny_cpu"),
)


def status_of(words: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["clozeworks", *words.split()])
    with pytest.raises(SystemExit) as stopped:
        entry.main()
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


@pytest.mark.parametrize(("code", "words"), WRONG)
def test_a_refusal_before_any_work_ends_with_status_two_and_writes_nothing(
    code: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert status_of(words, monkeypatch) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and f"[{code}]" in error and "Fix: " in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "train", "valid"),
    [
        ("no-examples", "", "cat\tnoun\n"),
        ("empty-cells", "cat\tnoun\nrun\t\n", "cat\tnoun\n"),
        ("unknown-label", "cat\tnoun\nrun\tverb\n" * 4, "red\tadjective\n"),
    ],
)
def test_a_table_that_fits_no_task_ends_with_two(
    code: str,
    train: str,
    valid: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.tsv").write_text(f"word\tkind\n{train}")
    Path("valid.tsv").write_text(f"word\tkind\n{valid}")
    words = "finetune --model gone --task classification --train train.tsv --valid valid.tsv --no-tracking"
    assert status_of(f"{words} --text-column word --label-column kind", monkeypatch) == 2
    assert f"[{code}]" in capsys.readouterr().err


def test_a_check_that_finds_damage_ends_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "manifest.json").write_text("{", encoding="utf-8")
    for command in ("verify", "inspect", "stats"):
        assert status_of(f"{command} {tmp_path}", monkeypatch) == 1
        assert "[damaged-manifest]" in capsys.readouterr().err


@pytest.mark.long
def test_one_code_has_one_exit_status() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    bases = {node.name: [ast.unparse(base) for base in node.bases] for node in nodes if isinstance(node, ast.ClassDef)}

    def is_usage(name: str) -> bool:
        return name in ("UsageError", "SettingError") or any(map(is_usage, bases.get(name, [])))

    statuses = defaultdict(set)
    for call in (node for node in nodes if isinstance(node, ast.Call)):
        code = next((each.value for each in call.keywords if each.arg == "code"), None)
        if isinstance(code, ast.Constant) and (name := ast.unparse(call.func)) in bases:
            statuses[code.value].add(2 if is_usage(name) else 1)
    assert len(statuses) > 300
    assert {code for code, found in statuses.items() if len(found) > 1} == set()
    refused = ("incompatible-change", "another-optimizer", "incompatible-branch")
    assert all(statuses[code] == {2} for code in refused)
    assert statuses["missing-path"] == statuses["unknown-document"] == {2} and statuses["damaged-shard"] == {1}
