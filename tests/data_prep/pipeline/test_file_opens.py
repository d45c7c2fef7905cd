"""Opened files, counted in real runs of two sizes against numbers by hand, and the plans of very large corpora."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from data_prep import Tokenizer, open_dataset
from tests.support.data_prep_command import files_of
from tests.support.opened_files import counted_opens
from tests.support.preparations import Planned, planned
from tests.support.work_units import (
    gather,
    limit_known_shards,
    limit_near_search,
    limit_sums,
    limit_units,
    limits_of_files,
    size_of_plan,
)

WORDS = "river village teacher engine letter garden winter morning library machine question answer".split()


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


def opens_by_kind(opened: list[str], output: Path) -> Counter[str]:
    """How often files of each kind are opened below `output`, such as "map-#.sections" or "write train-#.tar"."""
    kinds = Counter[str]()
    for path in map(Path, opened):
        written = re.fullmatch(r"\.(.+)\.\d+-[0-9a-f]+\.partial", path.name)
        name = written[1] if written else path.name
        if path.parent in (output, output / ".work") and re.match(r"[a-z]+-\d", name):
            kinds[("write " if written else "") + re.sub("[0-9]+", "#", name)] += 1
    return kinds


def counted_by_hand(
    num_units: int,
    num_groups: int,
    shards: dict[str, int],
    *,
    num_near_parts: int = 0,
    num_joined: int = 0,
    pair_files: int,
    fan_in: int,
) -> Counter[str]:
    """How often files of each kind are opened, as `opens_by_kind` names them. A written file is opened a second time to
    wait until it is on disk, and a shard once more for its hash.

    Args:
        shards: train and valid shards.
        num_near_parts: of the search of near-duplicates; 0 without a search.
        num_joined: files of signatures that were joined of many; 0 where the units' own are read.
        pair_files: that are read at once.
        fan_in: results that are added up in one file.
    """
    num_shards = sum(shards.values())
    sums = {"units": num_units, "groups": num_groups, "shards": num_shards}
    num_sums = {name: -(-number // fan_in) for name, number in sums.items() if number > fan_in}
    expected = {
        "write inputs-#.jsonl": 2,
        "write map-#.sections": 2 * num_units,
        "map-#.sections": num_units * (1 + (num_groups or num_shards)),  # one for its summary
        "write group-#.sections": 2 * num_groups,
        "group-#.sections": num_groups + num_shards if num_groups else 0,
        **{f"write {split}-#.tar": 3 * number for split, number in shards.items()},
        **{f"write {split}-#.index.safetensors": 2 * number for split, number in shards.items()},
        **{f"write {split}-#.#.done.json": 2 * number for split, number in shards.items()},
        **{f"{split}-#.#.done.json": number for split, number in shards.items()},
        **{f"write {name}-#.counts.json": 2 * number for name, number in num_sums.items()},
        **{f"{name}-#.counts.json": number for name, number in num_sums.items()},
    }
    if num_near_parts:
        num_clusters = -(-num_near_parts // pair_files) if num_near_parts > pair_files else 0
        expected |= {
            "write map-#.signatures": 2 * num_units,
            "map-#.signatures": num_units if num_joined else num_units * (1 + num_near_parts),
            "write joined-#.signatures": 2 * num_joined,
            "joined-#.signatures": num_joined * (1 + num_near_parts),
            "write near-#-of-#.pairs": 2 * num_near_parts,
            "near-#-of-#.pairs": num_near_parts,
            "write clusters-#-of-#.pairs": 2 * num_clusters,
            "clusters-#-of-#.pairs": num_clusters,
        }
    return +Counter(expected)


@pytest.mark.long
@pytest.mark.parametrize(("is_gathered", "has_near"), [(False, False), (True, False), (True, True)])
def test_files_of_each_kind_are_opened_as_often_as_counted_by_hand(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_gathered: bool, has_near: bool
) -> None:
    """At two sizes, in both shapes and with near-duplicate search."""
    limit_near_search(monkeypatch, part_entries=500, files=12, joined=5, pair_files=6)
    gather(monkeypatch, is_gathered, source_groups=3)
    limit_sums(monkeypatch, 4)
    for num_units, num_near_parts, num_joined in ((12, 4, 0), (48, 16, 4)):
        folder, output = corpus(tmp_path / f"in{num_units}", num_units, 6), tmp_path / f"out{num_units}"
        work = plan_of(folder, tokenizer, near=has_near, shard_bytes=500 * num_units)
        with counted_opens() as opened:
            work.make(output)
        assert opens_by_kind(opened, output) == counted_by_hand(
            num_units,
            3 * is_gathered,
            {"train": 6, "valid": 1},
            num_near_parts=num_near_parts * has_near,
            num_joined=num_joined * has_near,
            pair_files=6,
            fan_in=4,
        )
        assert Counter(Path(path).name for path in opened if Path(path).parent == folder) == Counter(
            path.name for path in folder.iterdir()
        )


@pytest.mark.long
@pytest.mark.parametrize("near", [False, True])
def test_an_addition_reads_each_index_of_the_data_set_once_in_tasks_of_a_few(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, near: bool
) -> None:
    """The ids that the data set holds go from its indexes to the groups that need them, in files of bounded number."""
    limit_known_shards(monkeypatch, 3)
    folder = corpus(tmp_path / "in", 10, 6)
    for name in ("one", "two"):
        plan_of(folder, tokenizer, shard_bytes=3000).make(tmp_path / name)
    parent = open_dataset(tmp_path / "one").manifest
    assert len(parent.shards) > 6
    added = corpus(tmp_path / "more", 3, 6, seed=1)
    (added / "copies.jsonl").write_bytes((folder / "0003.jsonl").read_bytes())
    made = []
    for name, at_once in (("one", 3), ("two", 1 << 20)):
        limit_known_shards(monkeypatch, at_once)
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
    for always in (False, True):
        gather(monkeypatch, always)
        plan = plan_of(folder, tokenizer)
        assert bool(plan.plan.destinations.num_groups) == always
        assert plan.make(tmp_path / f"out{always}").dropped == {"duplicate": 12}
        made.append(files_of(tmp_path / f"out{always}"))
    assert made[0] == made[1]


@pytest.mark.long
def test_small_files_share_a_unit_and_units_grow_with_the_corpus(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = corpus(tmp_path / "in", 40, 1)
    made = []
    for unit_bytes, most_units, num_units in ((250, 4096, 40), (1 << 20, 4096, 1), (250, 4, range(4, 9))):
        limit_units(monkeypatch, most_units)
        plan = plan_of(folder, tokenizer, unit_bytes=unit_bytes)
        assert len(plan.plan.units) in (num_units if isinstance(num_units, range) else [num_units])
        plan.make(tmp_path / "out", fresh=True)
        made.append({name: data for name, data in files_of(tmp_path / "out").items() if name.startswith(("t", "v"))})
    assert made[0] == made[1] == made[2]


@pytest.mark.parametrize(
    ("num_tokens", "stated"),
    [(1e9, (239, 15, 1, 0)), (1e10, (2385, 155, 2, 13)), (1e11, (4096, 1547, 16, 40)), (1e12, (4096, 15469, 156, 125))],
)
def test_units_shards_and_groups_grow_with_the_corpus_as_the_readme_states(
    num_tokens: float, stated: tuple[int, ...]
) -> None:
    assert size_of_plan(num_tokens) == stated


@pytest.mark.parametrize("has_near", [False, True])
def test_at_most_two_million_files_are_opened_at_a_trillion_tokens(has_near: bool) -> None:
    """Also where files that cannot be split make twice as many units; each is an input, too."""
    num_units, num_train, num_valid, num_groups = size_of_plan(1e12)
    most_parts, most_joined, pair_files, fan_in = limits_of_files()
    opens = counted_by_hand(
        2 * num_units,
        num_groups,
        {"train": num_train, "valid": num_valid},
        num_near_parts=most_parts * has_near,
        num_joined=most_joined * has_near,
        pair_files=pair_files,
        fan_in=fan_in,
    )
    assert 2 * num_units + opens.total() <= 2_000_000
