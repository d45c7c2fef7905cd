"""Numbers of a command line, and options that are given more than once."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from data_prep.base.arguments import CommandParser, HelpFormatter, Joined, OnceFlag, at_least, local_output
from data_prep.base.errors import UsageError
from tests.support.error_codes import coded


def read(text: str, minimum: int = 1) -> int:
    parser = argparse.ArgumentParser(prog="show_batch.py")
    parser.add_argument("--rows", type=at_least(minimum))
    rows: int = parser.parse_args([f"--rows={text}"]).rows
    return rows


def test_numbers_from_the_minimum_are_accepted() -> None:
    assert [read("1"), read("12"), read("0", 0), read(str(2**63 - 1))] == [1, 12, 0, 2**63 - 1]


@pytest.mark.parametrize("text", ["0", "-3", "1.5", "", "many"])
def test_other_numbers_are_refused_with_the_bound(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read(text)
    assert caught.value.code == 2
    told = f"error: argument --rows: must be a whole number of 1 or more, got {text!r}"
    assert told in capsys.readouterr().err


def test_a_number_of_more_than_64_bits_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize("again", ["b", "a", "3"])
def test_an_option_with_a_single_value_is_refused_when_it_is_given_again(
    again: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = CommandParser(prog="x")
    parser.add_argument_group("group").add_argument("--source", default="3")
    for _ in range(2):  # another command line may have it again
        assert parser.parse_args(["--source", "a"]).source == "a"
    with pytest.raises(SystemExit) as caught:
        parser.parse_args([f"--source={again}", "--sou", "b"])
    assert caught.value.code == 2
    written = capsys.readouterr().err
    assert f"--source is given twice, {again} and b" in written and "[option-given-twice]" in written


def test_the_error_about_a_repeated_option_shows_no_password(capsys: pytest.CaptureFixture[str]) -> None:
    parser = CommandParser(prog="x")
    parser.add_argument("--uri")
    with pytest.raises(SystemExit):
        parser.parse_args(["--uri", "http://me:hunter2@a", "--uri", "http://me:hunter2@b"])
    assert "hunter2" not in capsys.readouterr().err


def test_a_flag_and_its_opposite_are_refused_together(capsys: pytest.CaptureFixture[str]) -> None:
    parser = CommandParser(prog="x")
    parser.add_argument("--quoting", action=OnceFlag)
    assert [parser.parse_args(words).quoting for words in ([], ["--quoting"], ["--no-quoting"])] == [None, True, False]
    with pytest.raises(SystemExit):
        parser.parse_args(["--quoting", "--no-quoting"])
    assert "--no-quoting is given twice, --quoting and --no-quoting" in capsys.readouterr().err


def test_values_between_positional_arguments_are_given_once_too(capsys: pytest.CaptureFixture[str]) -> None:
    parser = CommandParser(prog="x")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--model")
    read = parser.parse_intermixed_args(["a=1", "--model", "m", "b=2"])
    assert (read.overrides, read.model) == (["a=1", "b=2"], "m")
    with pytest.raises(SystemExit):
        parser.parse_intermixed_args(["--model", "m", "b=2", "--model", "n"])
    assert "--model is given twice, m and n" in capsys.readouterr().err


def test_a_place_to_write_is_a_path_and_no_folder_named_like_a_scheme() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=local_output("--output"))
    assert parser.parse_args(["--output", "a/b"]).output == Path("a/b")
    for url in ("s3://me:hunter2@bucket/out", "file:///out"):
        with pytest.raises(
            UsageError, match="^--output (s3://bucket/|file:///)out ", check=coded("local-path-required")
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
