"""A finished data set with damaged files: noticed by size, found by content, rebuilt to the same bytes or not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from data_prep.base.errors import UsageError, UserError
from data_prep.pipeline import repair as repair_module
from data_prep.pipeline.repair import find_damage
from data_prep.tokenizer.tokenizer import Tokenizer
from tests.support.data_prep_command import Command, files_of
from tests.support.kill_points import before_writing, stopped_after
from tests.support.living_data_sets import problems_of
from tests.support.preparations import Planned, planned, prepared, write_texts

OVERRIDES = ["shards.min_shards=3", "shards.valid_fraction=0.1", "shards.unit_bytes=30000"]


@pytest.fixture
def corpus(small_corpus: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(small_corpus, tmp_path / "corpus.jsonl"))


def plan_of(corpus: Path, tokenizer: Tokenizer, *overrides: str) -> Planned:
    return planned(corpus, tokenizer, *OVERRIDES, *overrides)


@pytest.fixture
def output(corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    plan_of(corpus, tokenizer).make(folder)
    return folder


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-512])


def test_a_finished_set_with_a_file_cut_or_gone_is_not_called_complete(
    corpus: Path, tokenizer: Tokenizer, output: Path
) -> None:
    cut(output / "train-000001.tar")
    (output / "valid-000000.index.safetensors").unlink()
    with pytest.raises(UserError) as refused:
        plan_of(corpus, tokenizer).make(output)
    message = str(refused.value)
    assert "train-000001.tar has " in message and "valid-000000.index.safetensors is missing" in message
    assert "--repair" in message and "train-000000" not in message


@pytest.mark.parametrize("num_workers", [1, pytest.param(2, marks=pytest.mark.spawn)])
def test_what_is_damaged_is_rebuilt_and_nothing_else_is_touched(
    corpus: Path, tokenizer: Tokenizer, output: Path, num_workers: int
) -> None:
    whole = files_of(output)
    cut(output / "train-000001.tar")
    flip(output / "train-000002.tar")
    flip(output / "train-000000.index.safetensors")
    (output / "valid-000000.tar").unlink()
    flip(output / "token_counts.safetensors")
    now = files_of(output)
    untouched = {name: (output / name).stat().st_mtime_ns for name, data in now.items() if data == whole[name]}
    names = ["token_counts.safetensors", "train-000000.index.safetensors", "train-000001.tar", "train-000002.tar"]
    plan = plan_of(corpus, tokenizer)
    assert [line.split()[0] for line in find_damage(plan.plan, str(output), 1)[1]] == [*names, "valid-000000.tar"]
    assert plan.repair(output, num_workers) == [*names, "valid-000000.tar"]
    assert files_of(output) == whole and not (output / ".repair").exists()
    assert untouched == {name: (output / name).stat().st_mtime_ns for name in untouched}
    assert problems_of(output) == []
    assert plan.repair(output) == []


@pytest.mark.long
def test_near_duplicates_are_left_out_of_a_rebuilt_shard_too(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    text = corpus.read_text(encoding="utf-8")
    corpus.write_text(text + text.replace("village", "valley"), encoding="utf-8")
    plan = plan_of(corpus, tokenizer, "deduplication.near=true", "deduplication.threshold=0.6")
    manifest = plan.make(tmp_path / "near")
    assert manifest.dropped["near duplicate"] > 0
    whole = files_of(tmp_path / "near")
    flip(tmp_path / "near" / "train-000001.tar")
    assert plan.repair(tmp_path / "near") == ["train-000001.tar"]
    assert files_of(tmp_path / "near") == whole


def test_another_input_replaces_nothing(
    corpus: Path, tokenizer: Tokenizer, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(output / "train-000001.tar")
    corpus.write_bytes(corpus.read_bytes().replace(b"river", b"raven"))
    before = files_of(output)
    with pytest.raises(UserError, match=r"corpus.jsonl has other content"):
        plan_of(corpus, tokenizer).repair(output)
    # Also where the clocks hide it.
    monkeypatch.setattr("data_prep.storage.storage.modified_at", lambda url: 0.0 if "corpus" in str(url) else 1.0)
    with pytest.raises(UserError, match=r"corpus.jsonl has other content .* nothing was replaced"):
        plan_of(corpus, tokenizer).repair(output)
    assert {name: data for name, data in files_of(output).items() if name[0] != "."} == before


def test_a_rebuilt_shard_of_other_bytes_replaces_nothing(
    corpus: Path, tokenizer: Tokenizer, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(output / "train-000001.tar")
    (output / "train-000002.tar").unlink()
    before = files_of(output)
    make_shards = repair_module.make_shards

    def other_release(*arguments: Any) -> object:
        results = make_shards(*arguments)
        flip(output / ".repair" / "train-000002.tar")
        return results

    monkeypatch.setattr(repair_module, "make_shards", other_release)
    with pytest.raises(UserError, match=r"the rebuilt train-000002.tar differs from .* nothing was replaced"):
        plan_of(corpus, tokenizer).repair(output)
    assert {name: data for name, data in files_of(output).items() if name[0] != "."} == before


def test_a_stopped_repair_goes_on_and_one_of_other_inputs_is_forgotten(
    corpus: Path, tokenizer: Tokenizer, output: Path
) -> None:
    whole = files_of(output)
    flip(output / "train-000001.tar")
    plan = plan_of(corpus, tokenizer)
    with pytest.raises(KeyboardInterrupt), stopped_after(2, "map-*.sections") as first:
        plan.repair(output)
    begun = files_of(output / ".repair")
    assert problems_of(output) and len([name for name in begun if "map-" in name]) == 2
    with before_writing("map-*.sections", lambda: None) as then:
        assert plan.repair(output) == ["train-000001.tar"]
    assert not {*first} & {*then} and len(first + then) == len(plan.plan.units) and files_of(output) == whole
    flip(output / "train-000001.tar")
    (output / ".repair").mkdir()
    (output / ".repair" / ".plan.json").write_text("{}")
    assert plan.repair(output) == ["train-000001.tar"] and files_of(output) == whole


def test_there_is_nothing_to_repair_without_a_finished_set_or_in_an_addition(
    corpus: Path, tokenizer: Tokenizer, output: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"holds no manifest.json, so there is nothing to repair"):
        plan_of(corpus, tokenizer).repair(tmp_path / "none")
    addition = planned(corpus, tokenizer, *OVERRIDES, parent=output)
    with pytest.raises(UsageError, match=r"--repair and --add-to"):
        addition.repair(output)


def test_a_shard_of_an_addition_is_named_and_the_others_are_rebuilt(
    corpus: Path, tokenizer: Tokenizer, output: Path, tmp_path: Path
) -> None:
    more = write_texts(tmp_path / "more.jsonl", ["Something new.", "Something else, also new."])
    manifest = prepared({"more": more}, tokenizer, output, *OVERRIDES, add=True)
    added = manifest.train.shards[-1].name
    whole = files_of(output)
    flip(output / added)
    flip(output / "train-000001.tar")
    with pytest.raises(UserError, match=rf"{added} cannot be rebuilt .*rebuilt: train-000001.tar"):
        plan_of(corpus, tokenizer).repair(output)
    assert [name for name, data in files_of(output).items() if data != whole[name]] == [added]


@pytest.mark.long
def test_the_command_repairs_and_says_what(corpus: Path, small_tokenizer: Path, output: Path, command: Command) -> None:
    words = ["shards", "--input", corpus, "--tokenizer", small_tokenizer, "--output", output, "--workers", 1]
    assert command(*words, *OVERRIDES) == 0 and "'clozeworks verify'" in command.output
    flip(output / "train-000001.tar")
    assert command(*words, *OVERRIDES) == 0, "the size is right"
    assert command(*words, "--repair", "--dry-run", *OVERRIDES) == 0
    assert "train-000001.tar has another sha256" in command.output and "would rebuild 1 file" in command.output
    assert command("verify", output, "--workers", 1) == 1
    assert command(*words, "--repair", *OVERRIDES) == 0 and "rebuilt train-000001.tar" in command.output
    assert command("verify", output, "--workers", 1) == 0
    for other in (["--fresh"], ["--shard-range", "1/2"]):
        assert command(*words, "--repair", *other, *OVERRIDES) == 2


def test_the_tokenizer_and_the_card_are_restored_or_named(
    small_tokenizer: Path, corpus: Path, output: Path, command: Command
) -> None:
    whole = files_of(output)
    words = ["shards", "--input", corpus, "--output", output, "--workers", 1, "--repair", *OVERRIDES, "--tokenizer"]

    def damage() -> None:
        (output / "tokenizer" / "tokenizer.json").write_text("{}")
        (output / "DATA_CARD.md").write_text("edited")

    damage()
    assert command(*words, small_tokenizer, "--dry-run") == 0 and "would rebuild 2 files" in command.output
    assert command(*words, output / "tokenizer") == 1, "there is nothing to copy from"
    assert "[damaged-data-set]" in command.errors and "tokenizer.json has sha256" in command.output
    assert "every file matches" not in command.output
    damage()
    assert command(*words, small_tokenizer) == 0 and "rebuilt DATA_CARD.md" in command.output
    assert files_of(output) == whole
