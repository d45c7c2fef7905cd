from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from launch import show_batch
from tests.support.data_prep_command import as_command


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["show_batch.py", "--config", "tiny_cpu", *map(str, arguments)])
    try:
        as_command(show_batch.main)
    except SystemExit as exit_:
        return int(exit_.code or 0)
    return 0


def test_rows_of_a_preset_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], small_shards: Path
) -> None:
    assert run(monkeypatch, f"data.shards={small_shards}", "--rows", 3, "--epoch", 1) == 0
    output = capsys.readouterr().out
    assert output.startswith("⟦word⟧ masked") and output.count("\nrow ") == 3
    assert "positions filled" in output and " predicted (" in output
    assert run(monkeypatch, f"data.shards={small_shards}", "--rows", 3, "--epoch", 1) == 0
    assert capsys.readouterr().out == output


def test_rows_are_printed_as_json_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], small_shards: Path
) -> None:
    assert run(monkeypatch, f"data.shards={small_shards}", "--json", "--samples", "2:5") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["row"], row["sample"]) for row in rows] == [(0, 2), (1, 3), (2, 4)]
    assert all(len(row["input_ids"]) == 64 and row["labels"] and row["pairs"] for row in rows)


def test_rows_without_sentences_are_printed_and_pairs_of_them_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shards_without_sentences: Path
) -> None:
    assert run(monkeypatch, f"data.shards={shards_without_sentences}", "data.sentence_pairs=none", "--rows", 2) == 0
    assert capsys.readouterr().out.count("\nrow ") == 2
    assert run(monkeypatch, f"data.shards={shards_without_sentences}", "--rows", 2) != 0
    assert "[no-sentences]" in capsys.readouterr().err


def test_help_names_every_field_of_the_json_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], small_shards: Path
) -> None:
    assert run(monkeypatch, f"data.shards={small_shards}", "--json", "--rows", 1) == 0
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert run(monkeypatch, "--help") == 0
    text = capsys.readouterr().out
    names = {*row, *row["documents"][0], *row["pairs"][0]}
    assert {name for name in names if not re.search(rf"\b{name}\b", text)} == set()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stage", "3"], "stages 0 to 0"),
        (["--sample", "100000000"], "[sample-out-of-range]"),
        (["--samples", "2:5", "--sample", "0"], "--samples 2:5 and --sample both choose the rows"),
        (["--samples", "2:5", "--rows", "4", "--sample", "1"], "--sample and --rows out. [contradicting-options]"),
        (["--rows", "0"], "--rows: must be a whole number of 1 or more, got '0'"),
    ],
)
def test_missing_rows_are_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    small_shards: Path,
    arguments: list[str],
    message: str,
) -> None:
    assert run(monkeypatch, f"data.shards={small_shards}", *arguments) == 2
    assert message in capsys.readouterr().err
