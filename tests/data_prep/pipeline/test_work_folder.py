"""An output folder in every state, and a disk that is really full: refused clearly, or gone on with."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.base.errors import UsageError, UserError
from data_prep.config.preparation_config import PreparationConfig, load_config
from data_prep.dataset.manifest import read_manifest
from data_prep.pipeline import map_phase, preparation
from data_prep.pipeline.map_task import MapTask
from data_prep.pipeline.plan import Plan, make_plan
from data_prep.pipeline.plan_changes import differences
from data_prep.pipeline.preparation import map_range, merge_ranges, prepare_shards
from data_prep.pipeline.units import ShardRange
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import Tokenizer
from tests.support.data_prep_command import files_of

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
    with interrupted_at(monkeypatch, preparation, "summarize"), pytest.raises(KeyboardInterrupt):
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


def test_the_plan_that_a_run_killed_at_its_end_left_blocks_no_addition(
    plan: Plan, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = storage.remove

    def killed(url: str) -> None:
        if url.endswith(".plan.json"):
            raise KeyboardInterrupt
        remove(url)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(storage, "remove", killed)
        prepare_shards(plan, tokenizer, str(tmp_path), 1)
    source = plan.config.sources[0].model_copy(update={"name": "more"})
    config = plan.config.model_copy(update={"sources": (source,)})
    addition = make_plan(config, tokenizer, read_manifest(str(tmp_path)))
    (tmp_path / ".work").mkdir()
    with pytest.raises(UserError, match="unfinished work of another preparation: the existing data set has"):
        prepare_shards(addition, tokenizer, str(tmp_path), 1)
    (tmp_path / ".work").rmdir()
    manifest, is_new = prepare_shards(addition, tokenizer, str(tmp_path), 1)
    assert is_new and manifest.version == 2 and not (tmp_path / ".plan.json").exists()


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


def test_work_that_stopped_at_bad_input_goes_on_where_such_input_is_to_be_left_out(
    small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    corpus, output = tmp_path / "*.jsonl", tmp_path / "out"
    (tmp_path / "sound.jsonl").write_bytes(small_corpus.read_bytes())
    (tmp_path / "broken.jsonl").write_text('{"text": "sound"}\nbroken\n')  # the smallest unit, so the last
    strict, tolerant = (config_of(corpus, f"documents.on_bad_input={policy}") for policy in ("error", "skip"))
    with pytest.raises(UserError, match="is not JSON"):
        prepare_shards(make_plan(strict, tokenizer), tokenizer, str(output), 1)
    finished = {path.name: path.stat().st_mtime_ns for path in output.glob(".work/map-*")}
    assert len(finished) > 1
    with pytest.raises(UserError, match="shards.seed was 0 and is now 1"):
        seeded = config_of(corpus, "documents.on_bad_input=skip", "shards.seed=1")
        prepare_shards(make_plan(seeded, tokenizer), tokenizer, str(output), 1)
    summarize, seen = preparation.summarize, {}

    def note_files(*arguments: Any) -> Any:
        seen.update({path.name: path.stat().st_mtime_ns for path in output.glob(".work/map-*")})
        return summarize(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "summarize", note_files)
        prepare_shards(make_plan(tolerant, tokenizer), tokenizer, str(output), 1)
    assert finished.items() < seen.items(), "finished units are not read again"
    prepare_shards(make_plan(tolerant, tokenizer), tokenizer, str(tmp_path / "whole"), 1)
    assert files_of(output) == files_of(tmp_path / "whole")


def test_work_of_which_no_unit_was_done_binds_nobody(small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_bytes(small_corpus.read_bytes().replace(b'"text":', b'"content":'))
    output = str(tmp_path / "out")

    def prepare(*overrides: str) -> None:
        prepare_shards(make_plan(config_of(tmp_path / "corpus.jsonl", *overrides), tokenizer), tokenizer, output, 1)

    with pytest.raises(UserError, match="no field 'text'"):
        prepare()
    prepare("documents.text_field=content")
    with pytest.raises(UserError, match="holds the shards of another preparation"):
        prepare()


def test_skipped_input_does_not_become_an_error_on_the_way(
    plan: Plan, small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tolerant = make_plan(config_of(small_corpus, "documents.on_bad_input=skip"), tokenizer)
    with interrupted_at(monkeypatch, preparation, "summarize"), pytest.raises(KeyboardInterrupt):
        prepare_shards(tolerant, tokenizer, str(tmp_path), 1)
    with pytest.raises(UserError, match='documents.on_bad_input was "skip" and is now "error"'):
        prepare_shards(plan, tokenizer, str(tmp_path), 1)


def test_unfinished_work_whose_input_was_written_again_is_refused(
    small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(small_corpus.read_bytes())
    output = str(tmp_path / "out")
    with interrupted_at(monkeypatch, preparation, "summarize"), pytest.raises(KeyboardInterrupt):
        prepare_shards(make_plan(config_of(corpus), tokenizer), tokenizer, output, 1)
    corpus.write_bytes(small_corpus.read_bytes().replace(b"river", b"raven", 1))
    os.utime(corpus, ns=(1, 1))
    with pytest.raises(UserError, match="input .*corpus.jsonl was written again.*--fresh"):
        prepare_shards(make_plan(config_of(corpus), tokenizer), tokenizer, output, 1)


@pytest.mark.parametrize("name", [".plan.json", ".work/ranges.json", ".work/map-000000.sections", "done"])
def test_damaged_work_is_told_and_becomes_no_data_set(
    plan: Plan,
    tokenizer: Tokenizer,
    whole: dict[str, bytes],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    map_range(plan, tokenizer, str(tmp_path), 1, ShardRange(1, 1))
    if name == "done":
        with interrupted_at(monkeypatch, preparation, "publish_shards"), pytest.raises(KeyboardInterrupt):
            merge_ranges(plan, tokenizer, str(tmp_path), 1)
        name = ".work/train-000000.000000.done.json"
    data = (tmp_path / name).read_bytes()
    middle = len(data) // 2
    flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    for damaged in (flipped, b"", b"{}", b"0"):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(UserError, match=f"{Path(name).name} is damaged.*--fresh"):
            merge_ranges(plan, tokenizer, str(tmp_path), 1)
    assert not (tmp_path / "manifest.json").exists()
    prepare_shards(plan, tokenizer, str(tmp_path), 1, fresh=True)
    assert files_of(tmp_path) == whole


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
    begin = preparation.begin_work

    def watched(*arguments: object) -> int:
        number = begin(*arguments)  # type: ignore[arg-type]
        written.update(files_of(tmp_path / "out"))
        return number

    monkeypatch.setattr(preparation, "begin_work", watched)
    prepare_shards(plan, tokenizer, str(tmp_path / "out"), 1)
    written.update(files_of(tmp_path / "out"))
    assert ".plan.json" in written and not [name for name, data in written.items() if b"hunter2" in data]
    assert json.loads(written["manifest.json"])["sources"][0]["url"] == "https://example.org/corpus"


@contextlib.contextmanager
def stopped_after_units(count: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A preparation that stops once so many units of the first phase are done."""
    work, calls = map_phase.map_unit, itertools.count()

    def stopping(task: MapTask) -> int:
        if next(calls) == count:
            raise KeyboardInterrupt
        return work(task)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(map_phase, "map_unit", stopping)
        yield


def rewrite(path: Path, data: bytes) -> None:
    """Rewrite the file as tools that keep times do: of equal size, with the time of writing that it had."""
    status = path.stat()
    assert len(data) == status.st_size
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_an_input_rewritten_with_its_old_size_and_time_is_not_mixed_in(
    small_corpus: Path, tokenizer: Tokenizer, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, output = tmp_path / "corpus.jsonl", str(tmp_path / "out")
    data = small_corpus.read_bytes()
    corpus.write_bytes(data)
    with stopped_after_units(2, monkeypatch):
        prepare_shards(make_plan(config_of(corpus), tokenizer), tokenizer, output, 1)
    rewrite(corpus, data.replace(b"river", b"raven"))
    for _ in range(2):
        with pytest.raises(UserError, match=r"unfinished work.*input .*corpus.jsonl was written again.*--fresh"):
            prepare_shards(make_plan(config_of(corpus), tokenizer), tokenizer, output, 1)
    rewrite(corpus, data)
    prepare_shards(make_plan(config_of(corpus), tokenizer), tokenizer, output, 1)
    assert shards_of(files_of(tmp_path / "out")) == shards_of(whole)


def test_touched_and_copied_inputs_and_work_of_equal_content_go_on(
    small_corpus: Path, tokenizer: Tokenizer, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = tmp_path / "corpus.jsonl"
    shutil.copy(small_corpus, corpus)
    with stopped_after_units(2, monkeypatch):
        prepare_shards(make_plan(config_of(corpus), tokenizer), tokenizer, str(tmp_path / "first"), 1)
    corpus.unlink()
    shutil.copy(small_corpus, corpus)
    os.utime(corpus, ns=(1, 1))
    shutil.copytree(tmp_path / "first", tmp_path / "out")
    with stopped_after_units(1, monkeypatch):
        prepare_shards(make_plan(config_of(corpus), tokenizer), tokenizer, str(tmp_path / "out"), 1)
    with monkeypatch.context() as patch:  # the stamps of equal content are noted: it is compared once
        patch.setattr("data_prep.pipeline.work_folder.changed_parts", lambda task: 1 / 0)
        prepare_shards(make_plan(config_of(corpus), tokenizer), tokenizer, str(tmp_path / "out"), 1)
    assert shards_of(files_of(tmp_path / "out")) == shards_of(whole)


def test_the_end_of_a_document_behind_its_units_range_is_compared_too(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, output = tmp_path / "corpus.jsonl", str(tmp_path / "out")
    line = json.dumps({"text": "river " * 30_000}) + "\n"  # more than six units long
    data = (line + json.dumps({"text": "The last one."}) + "\n").encode()
    corpus.write_bytes(data)
    with stopped_after_units(1, monkeypatch):
        prepare_shards(make_plan(config_of(corpus), tokenizer), tokenizer, output, 1)
    changed = data[:170_000] + data[170_000:].replace(b"river", b"raven", 1)
    rewrite(corpus, changed)
    with pytest.raises(UserError, match=r"corpus.jsonl was written again"):
        prepare_shards(make_plan(config_of(corpus), tokenizer), tokenizer, output, 1)


def test_an_input_touched_while_it_is_read_is_no_other_one(
    small_corpus: Path, tokenizer: Tokenizer, whole: dict[str, bytes], tmp_path: Path
) -> None:
    corpus = tmp_path / "corpus.jsonl"
    shutil.copy(small_corpus, corpus)
    plan = make_plan(config_of(corpus), tokenizer)
    os.utime(corpus, ns=(1, 1))
    prepare_shards(plan, tokenizer, str(tmp_path / "out"), 1)
    assert shards_of(files_of(tmp_path / "out")) == shards_of(whole)


def test_ranges_and_their_merge_compare_a_changed_input(
    small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    corpus, output = tmp_path / "corpus.jsonl", str(tmp_path / "out")
    data = small_corpus.read_bytes()
    corpus.write_bytes(data)
    map_range(make_plan(config_of(corpus), tokenizer), tokenizer, output, 1, ShardRange(1, 2))
    rewrite(corpus, data.replace(b"river", b"raven"))
    changed = make_plan(config_of(corpus), tokenizer)
    with pytest.raises(UserError, match=r"corpus.jsonl was written again"):
        map_range(changed, tokenizer, output, 1, ShardRange(1, 2))
    map_range(changed, tokenizer, output, 1, ShardRange(2, 2))
    with pytest.raises(UserError, match=r"corpus.jsonl was written again"):
        merge_ranges(changed, tokenizer, output, 1)


def test_a_parquet_file_written_again_in_other_parts_is_refused(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, output = tmp_path / "corpus.parquet", str(tmp_path / "out")
    texts = pa.table({"text": [f"The river {number} " * 500 for number in range(40)]})
    pq.write_table(texts, corpus, row_group_size=10, compression="none", use_dictionary=False)
    (tmp_path / "last.txt").write_text("The last one.")
    plan = make_plan(config_of(tmp_path / "*.*"), tokenizer)
    with stopped_after_units(1, monkeypatch):
        prepare_shards(plan, tokenizer, output, 1)
    pq.write_table(texts, corpus, row_group_size=20, compression="none", use_dictionary=False)
    other = make_plan(config_of(tmp_path / "*.*"), tokenizer)
    assert len(other.units) != len(plan.units)
    # Of equal size, as a file of other row groups may be.
    inputs = tuple(replace(now, bytes=then.bytes) for now, then in zip(other.inputs, plan.inputs, strict=True))
    with pytest.raises(UserError, match=r"corpus.parquet was written again"):
        prepare_shards(replace(other, inputs=inputs), tokenizer, output, 1)


def shards_of(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if name.endswith((".tar", ".safetensors"))}


def test_of_changed_filters_the_one_that_changed_is_named() -> None:
    first = {"name": "my:one", "parameters": {"low": 1}, "source_sha256": "a"}
    second = {"name": "metadata", "parameters": {"keep": "x"}, "version": "1"}

    def found(*mine: dict[str, Any]) -> list[str]:
        described = [
            {"tokenizer": "t", "config": {"sources": [], "documents": {"filters": list(filters)}}, "inputs": {}}
            for filters in ((first, second), mine)
        ]
        return differences(*described)

    assert found(first, second) == []
    assert found({**first, "source_sha256": "b"}, second) == [
        "the code of filter my:one, or a value that it uses, changed"
    ]
    assert found({**first, "parameters": {"low": 2}}, {**second, "version": "2"}) == [
        "filter my:one parameters.low was 1 and is now 2",
        'filter metadata version was "1" and is now "2"',
    ]
    assert found(second) == ["documents.filters was my:one, metadata and is now metadata"]
