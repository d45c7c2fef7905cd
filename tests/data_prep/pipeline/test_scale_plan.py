"""The planner at any size: counted file opens of real runs against its formula, and the plans of very large corpora."""

from __future__ import annotations

import json
import os
import random
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from data_prep import open_dataset
from data_prep.config.preparation_config import PreparationConfig
from data_prep.deduplication import near_duplicates
from data_prep.executors import phases
from data_prep.pipeline import exclusion_phase, units
from data_prep.pipeline import scale_plan as scale
from data_prep.pipeline.scale_plan import file_opens, scale_plan
from data_prep.tokenizer.tokenizer import Tokenizer
from tests.support.data_prep_command import files_of
from tests.support.preparations import Planned, planned

WORDS = "river village teacher engine letter garden winter morning library machine question answer".split()
_opened: list[str] | None = None


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and _opened is not None and isinstance(arguments[0], (str, bytes, os.PathLike)):
        _opened.append(os.fsdecode(arguments[0]))


@contextmanager
def counted_opens() -> Iterator[list[str]]:
    """Paths of the files that this process opens meanwhile, as Python's audit hook reports them."""
    global _opened
    if not getattr(sys, "_clozeworks_opens", False):
        sys.addaudithook(_note)  # which cannot be taken away again
        sys._clozeworks_opens = True  # type: ignore[attr-defined]
    _opened = []
    try:
        yield _opened
    finally:
        _opened = None


def corpus(folder: Path, num_files: int, per_file: int, seed: int = 0) -> Path:
    folder.mkdir()
    generator = random.Random(seed)
    for number in range(num_files):
        texts = [" ".join(generator.choices(WORDS, k=40)) for _ in range(per_file)]
        lines = [json.dumps({"text": text, "id": index}) for index, text in enumerate(texts)]
        (folder / f"{number:04d}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def plan_of(folder: Path, tokenizer: Tokenizer, near: bool = False, **settings: object) -> Planned:
    shards = {"min_shards": 6, "valid_fraction": 0.1, "unit_bytes": 2000, **settings}
    return planned(f"{folder}/*.jsonl", tokenizer, deduplication={"near": near}, shards=shards)


@pytest.mark.long
@pytest.mark.parametrize(
    ("is_gathered", "has_near"),
    [(False, False), pytest.param(True, False, marks=pytest.mark.slow), (True, True)],
)
def test_a_run_opens_as_many_files_as_the_formula_says(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_gathered: bool, has_near: bool
) -> None:
    """At two sizes, in both shapes and with near-duplicate search; the formula is exact but for the few files of the
    command itself."""
    monkeypatch.setattr(near_duplicates, "MAX_FILES", 12)
    monkeypatch.setattr(near_duplicates, "MAX_JOINED", 5)
    monkeypatch.setattr(near_duplicates, "PAIR_FILES_AT_ONCE", 6)
    monkeypatch.setattr(near_duplicates, "_PART_ENTRIES", 500)
    monkeypatch.setattr(scale, "MAX_DIRECT_OPENS", 0 if is_gathered else 1 << 40)
    monkeypatch.setattr(scale, "_SOURCE_GROUPS", 3)
    monkeypatch.setattr(phases, "FAN_IN", 4)
    monkeypatch.setattr(scale, "FAN_IN", 4)
    totals, others = [], []
    for num_files in (12, 48):
        folder = corpus(tmp_path / f"in{num_files}", num_files, 6)
        work = plan_of(folder, tokenizer, near=has_near, shard_bytes=500 * num_files)
        plan = work.plan
        assert bool(plan.destinations.num_groups) == is_gathered
        output = tmp_path / f"out{num_files}"
        with counted_opens() as opened:
            work.make(output)
        mine = [Path(path) for path in opened if str(tmp_path) in path]
        found_parts = {int(found[1]) for path in mine if (found := re.search(r"near-\d+-of-(\d+)", path.name))}
        assert (min(found_parts, default=0) > 1) == has_near
        expected = file_opens(
            len(plan.parts), len(plan.units), plan.destinations, False, has_near, max(found_parts, default=0)
        )
        assert bool(expected.get("to join signatures")) == (has_near and num_files == 48)
        assert sum(path.parent == folder for path in mine) == expected["to read inputs"] == num_files
        shards, groups = len(plan.destinations), plan.destinations.num_groups
        reads = [path.name for path in mine if re.match(r"(map|group)-.*\.sections$", path.name)]
        # Each unit's file: once for its summary, then once for each group or shard; each group's file likewise.
        read_groups = shards if groups else 0
        assert len(reads) == len(plan.units) * (1 + (groups or shards)) + groups + read_groups
        others.append(len(mine) - sum(expected.values()))
        totals.append((len(plan.units), len(mine)))
    (small_units, small), (large_units, large) = totals
    assert large_units >= 3 * small_units
    # Lock, plan, manifest, card and tokenizer: as many at any size.
    assert 0 < others[0] < 60 and abs(others[1] - others[0]) <= 5, others
    if is_gathered:
        assert large < small * large_units / small_units * 1.2


@pytest.mark.long
@pytest.mark.parametrize("near", [False, True])
def test_an_addition_reads_each_index_of_the_data_set_once_in_tasks_of_a_few(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, near: bool
) -> None:
    """The ids that the data set holds go from its indexes to the groups that need them, in files of bounded number."""
    monkeypatch.setattr(exclusion_phase, "KNOWN_SHARDS_AT_ONCE", 3)
    folder = corpus(tmp_path / "in", 10, 6)
    for name in ("one", "two"):
        plan_of(folder, tokenizer, shard_bytes=3000).make(tmp_path / name)
    parent = open_dataset(tmp_path / "one").manifest
    assert len(parent.shards) > 6
    added = corpus(tmp_path / "more", 3, 6, seed=1)
    (added / "copies.jsonl").write_bytes((folder / "0003.jsonl").read_bytes())
    made = []
    for name, at_once in (("one", 3), ("two", 1 << 20)):
        monkeypatch.setattr(exclusion_phase, "KNOWN_SHARDS_AT_ONCE", at_once)
        config = plan_of(added, tokenizer, near=near).plan.config
        config = config.model_copy(update={"sources": (config.sources[0].model_copy(update={"name": "more"}),)})
        with counted_opens() as opened:
            planned(config, tokenizer, parent=parent).make(tmp_path / name)
        indexes = [path for path in opened if path.endswith(".index.safetensors") and "more" not in path]
        assert all(indexes.count(str(tmp_path / name / shard.index.name)) == 1 for shard in parent.shards)
        known = {path for path in opened if re.search(r"/known-\d+$", path)}
        assert len(known) == -(-len(parent.shards) // at_once)
        made.append(files_of(tmp_path / name))
    assert open_dataset(tmp_path / "one").manifest.dropped == {"in the data set already": 6}
    assert made[0] == made[1]


def test_gathering_changes_no_byte(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = corpus(tmp_path / "in", 9, 6)
    copies = folder / "9999.jsonl"
    copies.write_bytes((folder / "0001.jsonl").read_bytes() + (folder / "0000.jsonl").read_bytes())
    made = []
    for limit in (1 << 40, 0):
        monkeypatch.setattr(scale, "MAX_DIRECT_OPENS", limit)
        plan = plan_of(folder, tokenizer)
        assert bool(plan.plan.destinations.num_groups) == (limit == 0)
        assert plan.make(tmp_path / f"out{limit}").dropped == {"duplicate": 12}
        made.append(files_of(tmp_path / f"out{limit}"))
    assert made[0] == made[1]


@pytest.mark.long
def test_small_files_share_a_unit_and_units_grow_with_the_corpus(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = corpus(tmp_path / "in", 40, 1)
    made = []
    for unit_bytes, most_units, num_units in ((250, 4096, 40), (1 << 20, 4096, 1), (250, 4, range(4, 9))):
        monkeypatch.setattr(units, "MAX_UNITS", most_units)
        plan = plan_of(folder, tokenizer, unit_bytes=unit_bytes)
        assert len(plan.plan.units) in (num_units if isinstance(num_units, range) else [num_units])
        plan.make(tmp_path / "out", fresh=True)
        made.append({name: data for name, data in files_of(tmp_path / "out").items() if name.startswith(("t", "v"))})
    assert made[0] == made[1] == made[2]


def test_at_most_two_million_opens_at_a_trillion_tokens() -> None:
    found = {}
    for exponent in range(6, 13):
        plan = scale_plan(10**exponent, PreparationConfig())
        found[exponent] = plan.total_opens
        assert sum(plan.file_opens.values()) == plan.total_opens
        assert f"at most {plan.total_opens:,} file opens" in str(plan)
    assert found[12] <= 2_000_000 and found[11] <= 600_000
    assert scale_plan(10**12, PreparationConfig()).num_units <= 4096
    with_near = PreparationConfig.model_validate({"deduplication": {"near": True}})
    assert found[12] < scale_plan(10**12, with_near).total_opens <= 2_000_000
    # Files that cannot be split fill units badly: up to twice as many.
    destinations = scale_plan(10**12, PreparationConfig()).destinations
    assert sum(file_opens(8192, 8192, destinations, has_provenance=True, has_near=True).values()) <= 2_000_000
    assert scale_plan(10**9, PreparationConfig()).destinations.num_groups == 0
