"""Requests: arguments become one configuration, contradictions are refused, workers follow the amount of text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from data_prep.api import preparation_request
from data_prep.api.configuration import resolve_config
from data_prep.api.preparation_request import Request, plan_preparation, request_preparation, workers_for
from data_prep.base.errors import UsageError
from data_prep.config.preparation_config import Source
from data_prep.storage import storage
from tests.support.error_codes import coded
from tests.support.preparations import config_of
from tests.support.reading import InputFile


@pytest.fixture(autouse=True)
def no_options() -> Iterator[None]:
    before = storage.options()
    yield
    storage.configure(before)


def workers(wanted: int | None, *, megabytes: float, settings: tuple[str, ...] = (), output: str = "out") -> int:
    config = config_of("corpus.jsonl", "shards.seed=1", *settings)
    file = InputFile("corpus.jsonl", 0, int(megabytes * 1e6), "")
    return workers_for(wanted, Request(config, (file,), "tokenizer", None, output))


def test_little_text_is_not_worth_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation_request, "default_num_workers", lambda: 8)
    assert [workers(None, megabytes=size) for size in (0.1, 13, 1000)] == [1, 3, 8]


def test_a_number_that_is_asked_for_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation_request, "default_num_workers", lambda: 8)
    assert workers(3, megabytes=0.1) == 3
    assert workers(None, megabytes=0.1, settings=("num_workers=2",)) == 2
    assert workers(1, megabytes=1000, settings=("num_workers=2",)) == 1
    for impossible in (0, 4097, 9999999999):
        with pytest.raises(
            UsageError, match=rf"num_workers={impossible} \(--workers\)", check=coded("workers-out-of-range")
        ):
            workers(impossible, megabytes=1)


def test_what_is_in_this_processs_memory_is_worked_on_by_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation_request, "default_num_workers", lambda: 8)
    assert workers(None, megabytes=1000, output="memory://out") == 1
    assert workers(1, megabytes=1000, output="memory://out") == 1
    with pytest.raises(
        UsageError, match=r"memory://out.*num_workers=2 \(--workers\)", check=coded("memory-not-shared")
    ):
        workers(2, megabytes=1000, output="memory://out")
    with pytest.raises(UsageError, check=coded("workers-out-of-range")):
        workers(0, megabytes=1000, output="memory://out")


def test_a_tokenizers_folder_is_not_an_output(small_corpus: Path, small_tokenizer: Path) -> None:
    config = resolve_config(None, small_corpus)
    for tokenizer, output in (
        (str(small_tokenizer), f"{small_tokenizer}/"),
        ("elsewhere", str(small_tokenizer)),
        ("memory://t", "memory://t/"),
    ):
        with pytest.raises(UsageError, check=coded("output-is-a-tokenizer")):
            request_preparation(config, tokenizer=tokenizer, output=output)


def test_paths_mappings_and_overrides_become_one_configuration(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("shards: {min_shards: 3, seed: 5}\nsources: [{name: a, input: a.txt}]\n")
    by_file = resolve_config(tmp_path / "c.yaml", overrides=["shards.seed=6"])
    by_mapping = resolve_config(
        {"shards": {"min_shards": 3, "seed": 5}, "sources": [{"name": "a", "input": Path("a.txt")}]},
        overrides=["shards.seed=6"],
    )
    kept = resolve_config({"keep_dropped": tmp_path, "sources": [{"name": "a", "input": Path("a.txt")}]})
    assert kept.keep_dropped == str(tmp_path)
    assert by_file == by_mapping and (by_file.shards.min_shards, by_file.shards.seed) == (3, 6)
    named = resolve_config({"shards": {"min_shards": 3}}, sources=[{"name": "b", "input": [tmp_path / "b.txt"]}])
    assert [(source.name, source.input) for source in named.sources] == [("b", (str(tmp_path / "b.txt"),))]
    assert resolve_config(named, "c.txt", source_name="c").sources == (Source(name="c", input=("c.txt",)),)


def test_contradicting_and_missing_arguments_are_named(tmp_path: Path) -> None:
    for arguments, code in (
        ({}, "missing-input"),
        ({"inputs": "a", "sources": [{"name": "b", "input": "b"}]}, "contradicting-arguments"),
        ({"source_name": "x", "sources": [{"name": "b", "input": "b"}]}, "source-name-without-input"),
        ({"inputs": "a", "source_name": " "}, "source-name-without-input"),
    ):
        with pytest.raises(UsageError, check=coded(code)):
            resolve_config(None, **arguments)  # type: ignore[arg-type]
    config = resolve_config(None, "a.txt")
    with pytest.raises(UsageError, check=coded("contradicting-arguments")):
        resolve_config(config, overrides=["shards.seed=1"])
    with pytest.raises(UsageError, check=coded("contradicting-arguments")):
        request_preparation(config, tokenizer="t", output="o", add_to="o")
    with pytest.raises(UsageError, check=coded("missing-output")):
        request_preparation(config, tokenizer="t", output=None)
    with pytest.raises(UsageError, check=coded("missing-tokenizer")):
        request_preparation(config, tokenizer=None, output="o")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file", check=coded("output-is-a-file")):
        request_preparation(config, tokenizer="t", output=str(tmp_path / "file"))
    with pytest.raises(UsageError, match="--keep-dropped", check=coded("output-is-a-file")):
        keeping = config.model_copy(update={"keep_dropped": str(tmp_path / "file")})
        request_preparation(keeping, tokenizer="t", output="o")


def test_a_request_gives_a_plan(small_corpus: Path, small_tokenizer: Path) -> None:
    config = resolve_config({"shards": {"min_shards": 2}}, small_corpus)
    asked = plan_preparation(request_preparation(config, tokenizer=str(small_tokenizer), output="out"))
    assert asked.plan.destinations.num_train == 2 and asked.tokenizer.fingerprint == asked.plan.tokenizer_fingerprint


def test_a_tokenizer_on_the_hub_is_downloaded_or_answered_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("text\n")
    config = config_of("corpus.txt")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        UsageError,
        match=r"hf download someone/tiny --local-dir tiny.*clozeworks tokenizer --input",
        check=coded("hub-name-offline"),
    ):
        request_preparation(config, tokenizer="someone/tiny", output="out")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: f"{tmp_path}/cache/{name}")
    request = request_preparation(config, tokenizer="someone/tiny", output="out")
    assert request.tokenizer == f"{tmp_path}/cache/someone/tiny"
    (tmp_path / "someone" / "tiny").mkdir(parents=True)
    assert request_preparation(config, tokenizer="someone/tiny", output="out").tokenizer == "someone/tiny"


def test_one_filter_or_several_follow_those_of_the_configuration(tmp_path: Path) -> None:
    config = {"documents": {"filters": [{"name": "language", "assign": True}]}}
    entry = {"name": "metadata", "keep": "score > 1"}
    for given in (entry, [entry], "my_filters:keep", ["my_filters:keep"], lambda document: None):
        filters = resolve_config(config, tmp_path / "a.jsonl", filters=given).documents.filters
        assert filters[0].name == "language" and len(filters) == 2
