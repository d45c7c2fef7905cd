from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from launch import show_batch
from tests.support.data_prep_command import as_command


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    return run_plain(monkeypatch, "--config", "tiny_cpu", *arguments)


def run_plain(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["show_batch.py", *map(str, arguments)])
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


TEXT = "The old river flows with much noise around the narrow valley, and nobody remembers its first name."


def test_one_text_is_masked_a_line_per_token(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], small_tokenizer: Path
) -> None:
    arguments = ("--text", TEXT, "--tokenizer", small_tokenizer)
    assert run_plain(monkeypatch, *arguments, "--json", "--seed", 3) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["pieces"][0] == "[CLS]" and row["pieces"][-1] == "[SEP]"
    assert "".join(row["pieces"][1:-1]).replace("▁", " ").strip() == TEXT
    predicted = [number for number, treatment in enumerate(row["treatments"]) if treatment is not None]
    assert predicted and all(row["labels"][each] == row["ids"][each] for each in predicted)
    others = set(range(len(row["ids"]))) - set(predicted)
    assert all(row["labels"][each] == -100 and row["input_ids"][each] == row["ids"][each] for each in others)
    assert run_plain(monkeypatch, *arguments, "--seed", 3) == 0
    first, empty, header, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{len(row['ids']) - 2} tokens, {len(predicted)} to predict (rate 0.15, seed 3): ")
    assert not empty and header.split()[:3] == ["position", "piece", "id"] and len(lines) == len(row["ids"])
    assert [line.split()[5] for line in lines] == [str(label) for label in row["labels"]]
    assert run_plain(monkeypatch, *arguments, "--json", "--seed", 3) == 0
    assert json.loads(capsys.readouterr().out) == row, "a seed repeats its masks"
    assert run_plain(monkeypatch, *arguments, "--json", "--seed", 4) == 0
    assert json.loads(capsys.readouterr().out)["input_ids"] != row["input_ids"]


def test_one_text_has_the_masking_and_the_tokenizer_of_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], small_shards: Path
) -> None:
    arguments = ("--text", TEXT, "--json", f"data.shards={small_shards}")
    settings = ("data.mask_unit=word", "data.mlm_probability=0.5", "data.mask_share=0.0", "data.random_share=1.0")
    assert run(monkeypatch, *arguments, *settings) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["rate"] == 0.5 and set(row["treatments"]) == {None, "random"}
    of_words: dict[int, set[bool]] = {}
    word = 0
    for piece, treatment in zip(row["pieces"][1:-1], row["treatments"][1:-1], strict=True):
        word += piece.startswith("▁")
        of_words.setdefault(word, set()).add(treatment is None)
    assert all(len(kinds) == 1 for kinds in of_words.values()), "words are hidden whole"
    assert run(monkeypatch, *arguments, "data.masking_law.name=uniform", "data.mlm_probability=0.4") == 0
    assert json.loads(capsys.readouterr().out)["rate"] != 0.4, "drawn for the row"
    assert (
        run(monkeypatch, *arguments, "data.masking=tests.support.toy_masking:four_letters", "data.mlm_probability=0.8")
        == 0
    )
    row = json.loads(capsys.readouterr().out)
    words: list[tuple[str, bool]] = []
    for piece, treatment in zip(row["pieces"][1:-1], row["treatments"][1:-1], strict=True):
        before, hidden = ("", False) if piece.startswith("▁") else words.pop()
        words.append((before + piece.strip("▁"), hidden or treatment is not None))
    assert {word for word, hidden in words if hidden} == {"with", "much"}, "a masking of the user's own"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --config FILE for rows of a run, or --text TEXT"),
        (["--text", "a"], "--text without --config needs --tokenizer DIR"),
        (["--text", "a", "--tokenizer", "none", "data.mask_share=1"], "data.mask_share=1 overrides a configuration"),
        (["--text", "a", "--tokenizer", "SMALL", "--rows", "2"], "--rows cannot be used with --text"),
        (["--text", "  ", "--tokenizer", "SMALL"], "[empty-text]"),
        (["--text", "a", "--config", "tiny_cpu", "--tokenizer", "SMALL", "--stage", "3"], "stages 0 to 0"),
        (["--config", "tiny_cpu", "--seed", "0"], "--seed cannot be used with rows of a run"),
        (
            ["--text", "a", "--config", "tiny_cpu", "--tokenizer", "SMALL", "data.sentence_pairs=none"]
            + ["objectives=[{name: causal}]"],
            "[nothing-is-masked]",
        ),
    ],
)
def test_what_one_text_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    small_tokenizer: Path,
    arguments: list[str],
    message: str,
) -> None:
    given = [str(small_tokenizer) if each == "SMALL" else each for each in arguments]
    assert run_plain(monkeypatch, *given) == 2
    assert message in capsys.readouterr().err
