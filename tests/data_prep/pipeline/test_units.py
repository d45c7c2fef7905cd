"""Ranges of an array: disjoint, complete, balanced; together with `merge` the same bytes as one run."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep import Tokenizer
from data_prep.base.errors import UsageError, UserError
from data_prep.pipeline.units import ShardRange, assign_ranges
from data_prep.storage import storage
from tests.support.data_prep_command import files_of
from tests.support.error_codes import coded
from tests.support.preparations import Planned, planned


@pytest.fixture(scope="module")
def plan(small_corpus: Path, tokenizer: Tokenizer) -> Planned:
    shards = {"min_shards": 3, "valid_fraction": 0.1, "unit_bytes": 9000}
    return planned(small_corpus, tokenizer, shards=shards, deduplication={"near": True})


def test_a_range_counts_from_one() -> None:
    assert ShardRange.parse("3/16") == ShardRange(3, 16) and ShardRange(3, 16).name == "range-003-of-016"
    assert ShardRange.parse("100000/100000").num_ranges == 100_000
    many = ("1/100001", "1/1000000000", "1/" + "9" * 20, "1/" + "9" * 5000)
    for wrong in ("0/4", "5/4", "4", "a/b", "1/0", "-1/3", "1/3/5", "", *many):
        with pytest.raises(UsageError, check=coded("malformed-shard-range")):
            ShardRange.parse(wrong)


@given(st.lists(st.integers(0, 10**9), max_size=60), st.integers(1, 9))
def test_every_unit_is_in_one_range_and_the_largest_range_is_near_the_mean(sizes: list[int], num_ranges: int) -> None:
    ranges = assign_ranges(sizes, num_ranges)
    assert len(ranges) == len(sizes) and set(ranges) <= set(range(1, num_ranges + 1))
    loads = Counter(dict.fromkeys(range(1, num_ranges + 1), 0))
    for size, number in zip(sizes, ranges, strict=True):
        loads[number] += size
    overhead = (len(sizes) + 1) * (1 << 16)
    assert max(loads.values()) <= sum(sizes) / num_ranges + max(sizes, default=0) + overhead


def test_files_of_no_size_are_shared_out_by_number() -> None:
    assert sorted(Counter(assign_ranges([0] * 100, 8)).values()) == [12, 12, 12, 12, 13, 13, 13, 13]


@pytest.mark.long
def test_ranges_in_any_order_and_a_merge_give_the_bytes_of_one_run(plan: Planned, tmp_path: Path) -> None:
    plan.make(tmp_path / "whole")
    output = str(tmp_path / "out")
    done: set[str] = set()
    for number in (3, 1):
        assert plan.make_range(number, 3, output)
        now = {path.name for path in (tmp_path / "out" / ".work").glob("map-*.sections")}
        assert done < now
        done = now
    assert not plan.make_range(1, 3, output)
    num_units = len(plan.plan.units)
    left = num_units - len(done)
    with pytest.raises(UserError, match=f"{left}.*{num_units}.*small.jsonl", check=coded("ranges-unfinished")) as found:
        plan.merge(output)
    assert "the share of --shard-range 2/3." in str(found.value)
    assert plan.make_range(2, 3, output)
    assert plan.merge(output)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert not plan.merge(output)
    assert not plan.make_range(2, 3, output)


@pytest.mark.long
def test_a_merge_before_all_ranges_blocks_no_range(
    plan: Planned, small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    other = planned(small_corpus, tokenizer, "shards.seed=9")
    with pytest.raises(UserError, check=coded("ranges-unfinished")):
        other.merge(tmp_path)
    assert plan.make_range(1, 1, tmp_path)
    with pytest.raises(UserError, match="shards.seed.*0.*9", check=coded("other-preparation")):
        other.merge(tmp_path)
    assert plan.merge(tmp_path)


def test_ranges_run_at_once_except_equal_ones_and_the_whole_command(plan: Planned, tmp_path: Path) -> None:
    output = str(tmp_path / "out")
    with storage.hold_lock(output, ShardRange(1, 3).name):
        with pytest.raises(UserError, check=coded("folder-locked")):
            plan.make_range(1, 3, output)
        with pytest.raises(UserError, check=coded("folder-locked")):
            plan.make(output)
        with pytest.raises(UserError, check=coded("folder-locked")):
            plan.merge(output)
        plan.make_range(2, 3, output)
    with storage.hold_lock(output), pytest.raises(UserError, check=coded("folder-locked")):
        plan.make_range(3, 3, output)


@pytest.mark.long
def test_ranges_that_start_at_the_same_moment_all_succeed(plan: Planned, tmp_path: Path) -> None:
    start, errors = threading.Barrier(4), []

    def work(number: int) -> None:
        start.wait()
        try:
            replace(plan, tokenizer=Tokenizer.load(plan.tokenizer.folder)).make_range(number, 4, tmp_path)
        except UserError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in itertools.chain(threads):
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and plan.merge(tmp_path)


def test_a_range_of_other_settings_is_refused(
    plan: Planned, small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    plan.make_range(1, 2, tmp_path)
    other = planned(small_corpus, tokenizer, "shards.seed=3")
    with pytest.raises(UserError, match="shards.seed.*0.*3", check=coded("other-preparation")):
        other.make_range(2, 2, tmp_path)
