"""`merge` on the command line: what is cleared, what is only told, and what is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.data_prep_command import Command, files_of


@pytest.fixture
def arguments(small_corpus: Path, small_tokenizer: Path, tmp_path: Path) -> list[object]:
    output = tmp_path / "set"
    return ["--input", small_corpus, "--tokenizer", small_tokenizer, "--output", output, "--workers", 1]


def test_an_output_that_holds_an_input_is_refused(
    command: Command, arguments: list[object], small_corpus: Path
) -> None:
    output = ["--output", small_corpus.parent]
    for name in ("merge", "shards"):
        assert command(name, *arguments[:4], *output, "--workers", 1) == 2
        assert "[input-in-output]" in command.errors


def test_merge_reports_missing_units_makes_the_set_and_clears_it_with_fresh(
    command: Command, arguments: list[object], tmp_path: Path
) -> None:
    output = tmp_path / "set"
    assert command("merge", *arguments, "--dry-run") == 0
    assert "would " in command.output and "1 of 1 units" in command.output
    assert command("merge", *arguments) == 1, "no range is done"
    assert command("shards", *arguments, "--shard-range", "1/1") == 0, command.errors
    begun = files_of(output)
    assert begun and "manifest.json" not in begun

    assert command("merge", *arguments, "--dry-run") == 0
    assert "0 of 1 units" in command.output
    assert command("merge", *arguments, "--fresh", "--dry-run") == 0
    assert f"would clear {output}" in command.output
    assert files_of(output) == begun, "a dry run changes nothing"

    assert command("merge", *arguments) == 0, command.errors
    assert (output / "manifest.json").is_file()
    assert command("merge", *arguments, "--fresh") == 0
    assert f"cleared {output}" in command.output and "would" not in command.output
    assert files_of(output) == {}
