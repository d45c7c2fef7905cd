"""Help texts: paragraphs and list items are wrapped, long examples and rows of tables are broken."""

from __future__ import annotations

import argparse

import pytest

from data_prep.base.help_format import HelpFormatter

TEXT = """Do something with a
file.

    example --of a line that is longer than the terminal and stays

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
        "        than the terminal and stays",
        "",
        "One fact per sentence and more words",
        "than a line holds.",
        "- an item that is",
        "- another item with so many words that",
        "  it wraps",
    ]
