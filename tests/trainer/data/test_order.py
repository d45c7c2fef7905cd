from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.base.errors import UsageError
from data_prep.dataset.shards import ShardIndex
from trainer.data.order import MIXTURE_SLOTS, ComponentEpoch, EpochOrder, Mixture, merge_segments
from trainer.data.packing import RowSettings, Segments
from trainer.data.randomness import root_key
from trainer.data.shard_set import WINDOW_SHARDS


def all_rows(order: EpochOrder, row_counts: list[int]) -> list[tuple[int, int]]:
    """(shard, row of the shard) at every position of the epoch."""
    found = []
    windows, rows = order.locate(np.arange(order.num_rows))
    for window, row in zip(windows.tolist(), rows.tolist(), strict=True):
        for shard in order.windows[window].tolist():
            if row < row_counts[shard]:
                found.append((shard, row))
                break
            row -= row_counts[shard]
    return found


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=50).filter(any), st.integers(0, 1000))
def test_every_row_of_every_shard_comes_once_an_epoch(row_counts: list[int], seed: int) -> None:
    rows = all_rows(EpochOrder(row_counts, root_key(seed)), row_counts)
    expected = [(shard, row) for shard, count in enumerate(row_counts) for row in range(count)]
    assert sorted(rows) == expected


def test_a_reader_needs_sixteen_shards_at_a_time_and_each_once() -> None:
    row_counts = [10] * 40
    shards = [shard for shard, _ in all_rows(EpochOrder(row_counts, root_key(1)), row_counts)]
    windows = [set(shards[first : first + 160]) for first in range(0, 400, 160)]
    assert [len(window) for window in windows] == [WINDOW_SHARDS, WINDOW_SHARDS, 8]
    assert sum(map(len, windows)) == len(set.union(*windows)) == 40


def test_other_keys_give_other_orders_and_equal_keys_the_same() -> None:
    row_counts = [50] * 20
    orders = [all_rows(EpochOrder(row_counts, root_key(seed)), row_counts) for seed in (0, 0, 1)]
    assert orders[0] == orders[1]
    assert sum(left == right for left, right in zip(orders[0], orders[2], strict=True)) < 20
    assert orders[0] != sorted(orders[0])


def test_windows_of_equal_size_have_orders_of_their_own() -> None:
    order = EpochOrder([10] * 32, root_key(0))
    rows = order.locate(np.arange(320))[1].reshape(2, 160)
    assert (rows[0] == rows[1]).sum() < 10


def test_positions_can_be_requested_in_any_grouping() -> None:
    order = EpochOrder([7, 90, 3] * 10, root_key(4))
    windows, rows = order.locate(np.arange(order.num_rows))
    for positions in (np.array([5]), np.arange(80, 1000, 7), np.empty(0, np.int64)):
        some_windows, some_rows = order.locate(positions)
        assert np.array_equal(some_windows, windows[positions])
        assert np.array_equal(some_rows, rows[positions])


def test_a_mixture_is_exact_in_every_table() -> None:
    mixture = Mixture([5.0, 2.0, 1.0], root_key(1))
    assert mixture.counts.tolist() == [2560, 1024, 512]
    components, _ = mixture.locate(np.arange(3 * MIXTURE_SLOTS))
    for first in range(0, 3 * MIXTURE_SLOTS, MIXTURE_SLOTS):
        assert np.bincount(components[first : first + MIXTURE_SLOTS]).tolist() == [2560, 1024, 512]
    # Well mixed too: about 5/8 of any thousand.
    assert 560 < (components[:1000] == 0).sum() < 690


@given(st.lists(st.floats(0.1, 50.0), min_size=2, max_size=6))
def test_components_of_a_mixture_advance_one_sample_at_a_time(weights: list[float]) -> None:
    mixture = Mixture(weights, root_key(0))
    assert mixture.counts.sum() == MIXTURE_SLOTS
    exact = np.array(weights) / sum(weights) * MIXTURE_SLOTS
    assert abs(mixture.counts - exact).max() < 1
    components, earlier = mixture.locate(np.arange(9000))
    for component in range(len(weights)):
        own = earlier[components == component]
        assert np.array_equal(own, np.arange(len(own)))


def test_a_weight_below_one_place_is_refused() -> None:
    with pytest.raises(UsageError, match=r"data.shards\[1\].weight=0.0001"):
        Mixture([1.0, 0.0001], root_key(0))


def test_a_window_has_its_own_shards_and_those_of_the_next_window_fetched(index_of: Callable[..., ShardIndex]) -> None:
    index = index_of([[4]])
    fetched: list[int] = []
    shards: list[Any] = [
        SimpleNamespace(
            record=SimpleNamespace(tokens=4, documents=1),
            read_index=lambda: index,
            itemsize=4,
            prefetch=lambda number=number: fetched.append(number),
        )
        for number in range(4 * WINDOW_SHARDS)
    ]
    epoch = ComponentEpoch(shards, RowSettings(8, None, 0.0), root_key(1))
    seen = []
    for window in range(4):
        fetched.clear()
        _, (shard, *_) = epoch.segments_of_epoch(np.array([window * WINDOW_SHARDS]))
        assert len(set(fetched)) == len(fetched) and shard.prefetch
        seen.append(set(fetched))
    assert [len(numbers) for numbers in seen] == [2 * WINDOW_SHARDS] * 3 + [WINDOW_SHARDS]
    assert [len(a & b) for a, b in zip(seen, seen[1:], strict=False)] == [WINDOW_SHARDS] * 3
    assert set.union(*seen) == set(range(4 * WINDOW_SHARDS))


def segments_of(rows: list[int], shard: int, first: int) -> Segments:
    """A segment for each of `rows`, in one shard, told apart by their starts."""
    same = np.full(len(rows), 1)
    starts = np.arange(first, first + len(rows))
    return Segments(np.array(rows), np.full(len(rows), shard), starts, same, same * 0, same * -100)


def test_parts_of_several_origins_are_merged_into_one_order_of_rows() -> None:
    shards: list[Any] = ["a", "b", "c"]
    parts = [
        (np.array([1, 3]), segments_of([0, 0, 1], 1, 10), shards[:2]),
        (np.array([0, 2]), segments_of([0, 1, 1], 0, 20), shards[2:]),
    ]
    merged, found = merge_segments(parts)
    assert found == ["a", "b", "c"]
    assert merged.rows.tolist() == [0, 1, 1, 2, 2, 3]
    assert merged.shards.tolist() == [2, 1, 1, 2, 2, 1]
    assert merged.starts.tolist() == [20, 10, 11, 21, 22, 12]


def test_one_part_keeps_its_segments_and_nothing_has_none() -> None:
    merged, found = merge_segments([(np.array([0, 1]), segments_of([0, 1, 1], 0, 5), ["a"])])
    assert found == ["a"] and merged.rows.tolist() == [0, 1, 1] and merged.starts.tolist() == [5, 6, 7]
    merged, found = merge_segments([])
    assert found == [] and all(len(column) == 0 for column in vars(merged).values())
