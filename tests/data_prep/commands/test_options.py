"""Shared arguments: as many processes as are asked for, or as the text is worth."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from data_prep.base.errors import UsageError
from data_prep.commands import options
from data_prep.commands.options import Request, add_workers, preparation, requested, workers_for
from data_prep.config.preparation_config import load_config
from data_prep.documents.input_files import InputFile


def workers(*arguments: str, megabytes: float, settings: tuple[str, ...] = (), output: str = "out") -> int:
    parser = argparse.ArgumentParser()
    add_workers(parser)
    config = load_config(None, ["shards.seed=1", *settings], ["corpus.jsonl"])
    file = InputFile("corpus.jsonl", 0, int(megabytes * 1e6), "")
    return workers_for(parser.parse_args(arguments), Request(config, (file,), "tokenizer", None, output))


def test_little_text_is_not_worth_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "default_num_workers", lambda: 8)
    assert workers(megabytes=0.1) == 1
    assert workers(megabytes=13) == 3
    assert workers(megabytes=1000) == 8


def test_a_number_that_is_asked_for_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "default_num_workers", lambda: 8)
    assert workers("--workers", "3", megabytes=0.1) == 3
    assert workers(megabytes=0.1, settings=("num_workers=2",)) == 2
    assert workers("--workers", "1", megabytes=1000, settings=("num_workers=2",)) == 1
    for impossible in ("0", "4097", "9999999999"):
        with pytest.raises(UsageError, match=f"--workers={impossible} is not possible"):
            workers("--workers", impossible, megabytes=1)


def test_what_lies_in_this_processs_memory_is_worked_on_by_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "default_num_workers", lambda: 8)
    assert workers(megabytes=1000, output="memory://out") == 1
    assert workers("--workers", "1", megabytes=1000, output="memory://out") == 1
    with pytest.raises(UsageError, match="memory://out is in the memory of one process, so --workers=2 cannot reach"):
        workers("--workers", "2", megabytes=1000, output="memory://out")
    with pytest.raises(UsageError, match="--workers=0"):
        workers("--workers", "0", megabytes=1000, output="memory://out")


def test_a_plan_has_the_inputs_of_its_request(small_corpus: Path, small_tokenizer: Path, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    options.add_shard_making(parser)
    words = ["--input", str(small_corpus), "--tokenizer", str(small_tokenizer), "--output", str(tmp_path / "out")]
    request = requested(parser.parse_args(words), [])
    assert [file.url for file in request.inputs] == [str(small_corpus)]
    assert preparation(request).plan.inputs == request.inputs


def test_files_of_a_repeated_input_are_added_and_none_is_dropped() -> None:
    parser = argparse.ArgumentParser()
    options.add_preparation(parser)
    assert parser.parse_args(["--input", "a", "b", "--fresh", "--input", "c"]).input == ["a", "b", "c"]
    assert parser.parse_args([]).input == [], "no list of another call"


def test_a_tokenizers_folder_is_no_place_for_a_data_set(small_corpus: Path, small_tokenizer: Path) -> None:
    parser = argparse.ArgumentParser()
    options.add_shard_making(parser)
    for tokenizer, output in (
        (small_tokenizer, f"{small_tokenizer}/"),
        ("elsewhere", small_tokenizer),
        ("memory://t", "memory://t/"),
    ):
        words = ["--input", small_corpus, "--tokenizer", tokenizer, "--output", output]
        with pytest.raises(UsageError, match="is the folder of a tokenizer; name another for the data set"):
            requested(parser.parse_args([str(word) for word in words]), [])
