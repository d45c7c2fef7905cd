"""Numbers of a command line, and options that are given more than once."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from data_prep.base.arguments import HelpFormatter, Joined, Once, at_least, local_output
from data_prep.base.errors import UsageError


def read(text: str, minimum: int = 1) -> int:
    parser = argparse.ArgumentParser(prog="show_batch.py")
    parser.add_argument("--rows", type=at_least(minimum))
    rows: int = parser.parse_args([f"--rows={text}"]).rows
    return rows


def test_a_number_from_the_minimum_on_is_taken() -> None:
    assert [read("1"), read("12"), read("0", 0), read(str(2**63 - 1))] == [1, 12, 0, 2**63 - 1]


@pytest.mark.parametrize("text", ["0", "-3", "1.5", "", "many"])
def test_any_other_is_refused_with_the_bound(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read(text)
    assert caught.value.code == 2
    told = f"error: argument --rows: must be a whole number of 1 or more, got {text!r}"
    assert told in capsys.readouterr().err


def test_one_of_more_than_64_bits_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read(str(2**63))
    assert "argument --rows: must be at most 9223372036854775807, got 9223372036854775808" in capsys.readouterr().err


def test_a_list_in_commas_that_is_given_again_is_added_to() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", action=Joined)
    assert [parser.parse_args(words).gpus for words in ([], ["--gpus=8"], ["--gpus=8,16", "--gpus=64"])] == [
        None,
        "8",
        "8,16,64",
    ]


def test_a_value_that_must_not_be_lost_is_given_once(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", action=Once)
    assert parser.parse_args(["--source", "a"]).source == "a"
    with pytest.raises(SystemExit):
        parser.parse_args(["--source", "a", "--source", "b"])
    assert "--source is given twice, a and b; run the command once for each" in capsys.readouterr().err


def test_a_place_to_write_is_a_path_and_no_folder_named_like_a_scheme() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=local_output("--output"))
    assert parser.parse_args(["--output", "a/b"]).output == Path("a/b")
    for url in ("s3://me:hunter2@bucket/out", "file:///out"):
        with pytest.raises(
            UsageError, match=r"^--output (s3://bucket/|file:///)out is a URL, and .* local path"
        ) as told:
            parser.parse_args(["--output", url])
        assert "hunter2" not in str(told.value)


TEXT = """Do something with a
file.

    example --of a line that is longer than --all terminals [with more than one word ...]
    name        the text of a row in two columns
                its second line, which is long too

One fact per sentence and more words
than a line holds.
- an item that is
- another item with so many words that it wraps
"""


def test_paragraphs_and_items_are_filled_and_examples_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "42")
    parser = argparse.ArgumentParser(prog="x", description=TEXT, formatter_class=HelpFormatter, add_help=False)
    lines = parser.format_help().splitlines()[2:]
    assert lines == [
        "Do something with a file.",
        "",
        "    example --of a line that is longer \\",
        "        than --all terminals \\",
        "        [with more than one word ...]",
        "    name        the text of a row in two",
        "                columns",
        "                its second line, which",
        "                is long too",
        "",
        "One fact per sentence and more words",
        "than a line holds.",
        "- an item that is",
        "- another item with so many words that",
        "  it wraps",
    ]
