"""An output folder in every state, and a disk that is really full: refused clearly, or gone on with."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_prep.config import PreparationConfig, load_config
from data_prep.errors import UsageError, UserError
from data_prep.files import storage
from data_prep.preparing import prepare
from data_prep.preparing.plan import Plan, make_plan
from data_prep.preparing.prepare import prepare_shards
from data_prep.tokenizing.tokenizer import Tokenizer
from tests.data_prep_command import files_of

SECRET_URL = "https://user:hunter2@example.org/corpus?token=hunter2"


@pytest.fixture(scope="module")
def tokenizer(small_tokenizer: Path) -> Tokenizer:
    return Tokenizer.load(small_tokenizer)


@pytest.fixture(scope="module")
def plan(small_corpus: Path, tokenizer: Tokenizer) -> Plan:
    return make_plan(config_of(small_corpus), tokenizer)


@pytest.fixture(scope="module")
def whole(plan: Plan, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a run that nothing stopped."""
    folder = tmp_path_factory.mktemp("whole")
    prepare_shards(plan, tokenizer, str(folder), 1)
    return files_of(folder)


def config_of(corpus: Path, *overrides: str) -> PreparationConfig:
    settings = ["shards.min_shards=2", "shards.valid_fraction=0.1", "shards.unit_bytes=30000", *overrides]
    return load_config(None, settings, [str(corpus)])


@contextlib.contextmanager
def interrupted_at(monkeypatch: pytest.MonkeyPatch, module: object, function: str) -> Iterator[None]:
    """Stop whoever calls the function."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, function, stop)
        yield


def test_an_input_in_the_output_folder_is_refused(small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    corpus = tmp_path / "out" / "raw" / "corpus.jsonl"
    corpus.parent.mkdir(parents=True)
    corpus.write_bytes(small_corpus.read_bytes())
    with pytest.raises(UsageError, match="lies in the output folder"):
        prepare_shards(make_plan(config_of(corpus), tokenizer), tokenizer, str(tmp_path / "out"), 1)
    assert corpus.exists() and not (tmp_path / "out" / ".work").exists()


def test_the_tokenizer_may_lie_where_its_copy_goes(
    plan: Plan, small_tokenizer: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    own = tmp_path / "tokenizer"
    own.mkdir()
    for path in small_tokenizer.iterdir():
        (own / path.name).write_bytes(path.read_bytes())
    for fresh in (False, True):
        prepare_shards(plan, Tokenizer.load(own), str(tmp_path), 1, fresh)
        assert files_of(tmp_path) == whole


def test_fresh_removes_older_versions_and_leaves_what_is_not_ours(
    plan: Plan, tokenizer: Tokenizer, whole: dict[str, bytes], tmp_path: Path
) -> None:
    for name in ("notes.md", "manifest-000001.json", "train-000099.tar", "token_counts-000002.safetensors"):
        (tmp_path / name).write_text("old")
    prepare_shards(plan, tokenizer, str(tmp_path), 1, fresh=True)
    assert files_of(tmp_path) == {**whole, "notes.md": b"old"}


def test_work_whose_removal_was_cut_short_is_never_taken_for_another_plans(
    plan: Plan, small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    with interrupted_at(monkeypatch, prepare, "summarise"), pytest.raises(KeyboardInterrupt):
        prepare_shards(plan, tokenizer, str(output), 1)
    remove = storage.remove

    def cut_short(url: str) -> None:
        if url.endswith(".work"):
            (output / ".work" / "map-000000.sections").unlink()
            raise KeyboardInterrupt
        remove(url)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(storage, "remove", cut_short)
        prepare_shards(plan, tokenizer, str(output), 1, fresh=True)
    assert list(output.glob(".work/map-*"))
    other = make_plan(config_of(small_corpus, "documents.min_document_characters=200"), tokenizer)
    with pytest.raises(UserError, match="documents.min_document_characters was 1 and is now 200"):
        prepare_shards(other, tokenizer, str(output), 1)


def test_an_addition_waits_for_a_removal_that_is_not_finished(
    plan: Plan, small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    parent, _ = prepare_shards(plan, tokenizer, str(tmp_path), 1)
    (tmp_path / ".removal").mkdir()
    (tmp_path / "train-000009.tar").write_text("what the removal has written so far")
    source = plan.config.sources[0].model_copy(update={"name": "more"})
    addition = make_plan(plan.config.model_copy(update={"sources": (source,)}), tokenizer, parent)
    for fresh in (False, True):
        with pytest.raises(UserError, match="unfinished work of the command 'remove'"):
            prepare_shards(addition, tokenizer, str(tmp_path), 1, fresh)
    assert (tmp_path / "train-000009.tar").exists()


def test_unfinished_work_whose_input_was_written_again_is_refused(
    small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(small_corpus.read_bytes())
    output = str(tmp_path / "out")
    with interrupted_at(monkeypatch, prepare, "summarise"), pytest.raises(KeyboardInterrupt):
        prepare_shards(make_plan(config_of(corpus), tokenizer), tokenizer, output, 1)
    corpus.write_bytes(small_corpus.read_bytes().replace(b"river", b"raven", 1))
    os.utime(corpus, ns=(1, 1))
    with pytest.raises(UserError, match="input .*corpus.jsonl was written again.*--fresh"):
        prepare_shards(make_plan(config_of(corpus), tokenizer), tokenizer, output, 1)


def test_no_secret_reaches_plan_manifest_or_card(
    small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = PreparationConfig.model_validate(
        {
            "sources": [{"name": "one", "input": str(small_corpus), "url": SECRET_URL}],
            "storage_options": {"s3://bucket": {"secret": "hunter2"}},
            "shards": {"min_shards": 2},
        }
    )
    plan = make_plan(config, tokenizer)
    written: dict[str, bytes] = {}
    begin = prepare.begin_work

    def watched(*arguments: object) -> int:
        number = begin(*arguments)  # type: ignore[arg-type]
        written.update(files_of(tmp_path / "out"))
        return number

    monkeypatch.setattr(prepare, "begin_work", watched)
    prepare_shards(plan, tokenizer, str(tmp_path / "out"), 1)
    written.update(files_of(tmp_path / "out"))
    assert ".plan.json" in written and not [name for name, data in written.items() if b"hunter2" in data]
    assert json.loads(written["manifest.json"])["sources"][0]["url"] == "https://example.org/corpus"
