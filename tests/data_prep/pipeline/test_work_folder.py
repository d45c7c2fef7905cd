"""An output folder in every state, and a disk that is really full: refused clearly, or gone on with."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from data_prep import Tokenizer
from data_prep.base.errors import UsageError, UserError
from data_prep.pipeline.plan import differences
from tests.support.data_prep_command import files_of
from tests.support.error_codes import coded
from tests.support.kill_points import before_writing, stopped_after, stopped_before_removing
from tests.support.preparations import Manifest, Planned, planned

SECRET_URL = "https://user:hunter2@example.org/corpus?token=hunter2"


@pytest.fixture(scope="module")
def plan(small_corpus: Path, tokenizer: Tokenizer) -> Planned:
    return plan_of(small_corpus, tokenizer)


@pytest.fixture(scope="module")
def whole(plan: Planned, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a run that nothing stopped."""
    folder = tmp_path_factory.mktemp("whole")
    plan.make(folder)
    return files_of(folder)


def plan_of(corpus: Path | dict[str, Path], tokenizer: Tokenizer, *overrides: str, **options: Any) -> Planned:
    shards = {"min_shards": 2, "valid_fraction": 0.1, "unit_bytes": 30000}
    return planned(corpus, tokenizer, *overrides, shards=shards, **options)


def make(corpus: Path, tokenizer: Tokenizer, output: Path, *overrides: str, **options: Any) -> Manifest:
    return plan_of(corpus, tokenizer, *overrides).make(output, **options)


def first_unit(output: Path) -> Path:
    return min(output.glob(".work/map-*.sections"))


stopped_after_reading = partial(stopped_after, 0, "train-*.tar")
"""All units are read, and no shard is written."""


def test_an_input_in_the_output_folder_is_refused(small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    corpus = tmp_path / "out" / "raw" / "corpus.jsonl"
    corpus.parent.mkdir(parents=True)
    corpus.write_bytes(small_corpus.read_bytes())
    with pytest.raises(UsageError, check=coded("input-in-output")):
        make(corpus, tokenizer, tmp_path / "out")
    assert corpus.exists() and not (tmp_path / "out" / ".work").exists()


def test_the_tokenizer_may_already_be_in_the_folder_of_its_copy(
    plan: Planned, small_tokenizer: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    own = tmp_path / "tokenizer"
    own.mkdir()
    for path in small_tokenizer.iterdir():
        (own / path.name).write_bytes(path.read_bytes())
    for fresh in (False, True):
        replace(plan, tokenizer=Tokenizer.load(own)).make(tmp_path, fresh=fresh)
        assert files_of(tmp_path) == whole


def test_fresh_removes_older_versions_and_leaves_what_is_not_ours(
    plan: Planned, whole: dict[str, bytes], tmp_path: Path
) -> None:
    for name in ("notes.md", "manifest-000001.json", "train-000099.tar", "token_counts-000002.safetensors"):
        (tmp_path / name).write_text("old")
    (tmp_path / ".repair").mkdir()  # of an earlier release
    (tmp_path / ".repair" / "plan.json").write_text("old")
    plan.make(tmp_path, fresh=True)
    assert files_of(tmp_path) == {**whole, "notes.md": b"old"}


def test_half_removed_work_is_never_used_by_another_plan(
    plan: Planned, small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), stopped_after_reading():
        plan.make(output)
    with pytest.raises(KeyboardInterrupt), stopped_before_removing(".work", lambda: first_unit(output).unlink()):
        plan.make(output, fresh=True)
    assert list(output.glob(".work/map-*"))
    other = plan_of(small_corpus, tokenizer, "documents.min_document_characters=200")
    with pytest.raises(UserError, match="documents.min_document_characters.*1.*200", check=coded("other-preparation")):
        other.make(output)


def test_the_plan_that_a_run_killed_at_its_end_left_blocks_no_addition(
    plan: Planned, small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt), stopped_before_removing(".plan.json"):
        plan.make(tmp_path)
    addition = plan_of({"more": small_corpus}, tokenizer, parent=tmp_path)
    (tmp_path / ".work").mkdir()
    with pytest.raises(UserError, check=coded("other-preparation")):
        addition.make(tmp_path)
    (tmp_path / ".work").rmdir()
    assert addition.make(tmp_path).version == 2 and not (tmp_path / ".plan.json").exists()


def test_an_addition_waits_for_a_removal_that_is_not_finished(
    plan: Planned, small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    plan.make(tmp_path)
    (tmp_path / ".removal").mkdir()
    (tmp_path / "train-000009.tar").write_text("what the removal has written so far")
    addition = plan_of({"more": small_corpus}, tokenizer, parent=tmp_path)
    for fresh in (False, True):
        with pytest.raises(UserError, match="'remove'", check=coded("unfinished-work")):
            addition.make(tmp_path, fresh=fresh)
    assert (tmp_path / "train-000009.tar").exists()


def test_work_stopped_at_bad_input_continues_with_the_policy_skip(
    small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    corpus, output = tmp_path / "*.jsonl", tmp_path / "out"
    (tmp_path / "sound.jsonl").write_bytes(small_corpus.read_bytes())
    (tmp_path / "broken.jsonl").write_text('{"text": "sound"}\nbroken\n')  # the smallest unit, so the last
    tolerant = "documents.on_bad_input=skip"
    with pytest.raises(UserError, check=coded("invalid-json")):
        make(corpus, tokenizer, output)
    finished = {path.name for path in output.glob(".work/map-*")}
    assert len(finished) > 1
    with pytest.raises(UserError, match="shards.seed.*0.*1", check=coded("other-preparation")):
        make(corpus, tokenizer, output, tolerant, "shards.seed=1")
    with before_writing("map-*.sections", lambda: None) as then:
        make(corpus, tokenizer, output, tolerant)
    assert then and not finished & {*then}, "finished units are not read again"
    make(corpus, tokenizer, tmp_path / "whole", tolerant)
    assert files_of(output) == files_of(tmp_path / "whole")


def test_work_without_a_finished_unit_can_be_replaced(small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_bytes(small_corpus.read_bytes().replace(b'"text":', b'"content":'))
    output = str(tmp_path / "out")

    def prepare(*overrides: str) -> None:
        make(tmp_path / "corpus.jsonl", tokenizer, output, *overrides)

    with pytest.raises(UserError, match="'text'", check=coded("missing-field")):
        prepare()
    prepare("documents.text_field=content")
    with pytest.raises(UserError, check=coded("other-preparation")):
        prepare()


def test_work_made_with_the_policy_skip_refuses_the_policy_error(
    plan: Planned, small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    tolerant = plan_of(small_corpus, tokenizer, "documents.on_bad_input=skip")
    with pytest.raises(KeyboardInterrupt), stopped_after_reading():
        tolerant.make(tmp_path)
    with pytest.raises(UserError, match='documents.on_bad_input.*"skip".*"error"', check=coded("other-preparation")):
        plan.make(tmp_path)


@pytest.mark.parametrize("name", [".plan.json", ".work/ranges.json", "unit", "done"])
def test_damaged_work_is_reported_and_becomes_no_data_set(
    plan: Planned, whole: dict[str, bytes], name: str, tmp_path: Path
) -> None:
    plan.make_range(1, 1, tmp_path)
    if name == "done":
        with pytest.raises(KeyboardInterrupt), stopped_after(0, "token_counts*"):
            plan.merge(tmp_path)
        name = ".work/train-000000.000000.done.json"
    if name == "unit":
        name = str(first_unit(tmp_path).relative_to(tmp_path))
    data = (tmp_path / name).read_bytes()
    middle = len(data) // 2
    flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    for damaged in (flipped, b"", b"{}", b"0"):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(UserError, match=f"{Path(name).name}", check=coded("damaged-work-file")):
            plan.merge(tmp_path)
    assert not (tmp_path / "manifest.json").exists()
    plan.make(tmp_path, fresh=True)
    assert files_of(tmp_path) == whole


def test_no_secret_reaches_plan_manifest_or_card(small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = {"input": small_corpus, "url": SECRET_URL}
    plan = plan_of({"one": source}, tokenizer, storage_options={"s3://bucket": {"secret": "hunter2"}})
    written: dict[str, bytes] = {}
    with before_writing("map-*", lambda: written.update(files_of(tmp_path / "out"))):
        plan.make(tmp_path / "out")
    written.update(files_of(tmp_path / "out"))
    assert ".plan.json" in written and not [name for name, data in written.items() if b"hunter2" in data]
    assert json.loads(written["manifest.json"])["sources"][0]["url"] == "https://example.org/corpus"


def test_the_changed_filter_is_named() -> None:
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
