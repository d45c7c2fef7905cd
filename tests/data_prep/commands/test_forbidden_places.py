"""Paths that may not be looked at, or whose names are too long: each command says so, and what the system said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.data_prep_command import Command
from tests.support.forbidden_folder import forbid


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("shards --input CORPUS --output out --tokenizer DENIED/tokenizer", "Permission denied"),
        ("shards --input CORPUS --output DENIED/out --tokenizer TOKENIZER", "Permission denied"),
        ("shards --input CORPUS --output out --tokenizer TOKENIZER --config DENIED/c.yaml", "Permission denied"),
        ("shards --input DENIED/s.jsonl --output out --tokenizer TOKENIZER", "Permission denied"),
        ("tokenizer --input CORPUS --output DENIED/out", "Permission denied"),
        ("verify DENIED/set", "Permission denied"),
        ("verify set --config DENIED/c.yaml", "Permission denied"),
        ("inspect DENIED/tokenizer --vocabulary out", "Permission denied"),
        ("stats set --output DENIED/page", "Permission denied"),
        ("remove set --documents DENIED/ids", "Permission denied"),
        ("shards --input CORPUS --output LONG --tokenizer TOKENIZER", "File name too long"),
        ("tokenizer --input CORPUS --output LONG", "File name too long"),
        ("verify LONG", "File name too long"),
    ],
)
def test_a_folder_without_permission_is_reported_and_nothing_is_written(
    command: Command,
    small_corpus: Path,
    small_tokenizer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    denied = tmp_path / "denied"
    places = {"CORPUS": small_corpus, "TOKENIZER": small_tokenizer, "DENIED": denied, "LONG": "x" * 300}
    for name, place in places.items():
        words = words.replace(name, str(place))
    with monkeypatch.context() as patch:
        forbid(patch, denied)
        assert command(*words.split()) == 1
    assert re.search(rf"cannot be read(: | \(){reason}", command.errors) and not list(tmp_path.iterdir())
