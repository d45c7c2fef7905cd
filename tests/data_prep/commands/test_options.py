"""Shared arguments: how they reach a request, and the help of settings."""

from __future__ import annotations

import argparse

from data_prep.commands import options


def test_input_given_twice_is_added() -> None:
    parser = argparse.ArgumentParser()
    options.add_preparation(parser, ("documents",), "where")
    assert parser.parse_args(["--input", "a", "b", "--fresh", "--input", "c"]).input == ["a", "b", "c"]
    assert parser.parse_args([]).input == [], "no list of another call"


def test_only_settings_of_the_named_sections_are_described_and_lines_are_wrapped(monkeypatch: object) -> None:
    text = options.settings_help(("shards", "num_workers"))
    lines = text.splitlines()
    assert any(line.startswith("  shards.min_shards ") for line in lines)
    assert any(line.startswith("  num_workers ") for line in lines)
    assert "tokenizer." not in text and "documents." not in text
    assert max(map(len, lines)) <= 100
