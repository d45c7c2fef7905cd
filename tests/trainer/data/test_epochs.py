"""One pass: what it has fetched ahead."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from data_prep.dataset.shard_index import ShardIndex
from trainer.data.order import WINDOW_SHARDS, ComponentEpoch, merge_segments
from trainer.data.packing import RowSettings, Segments
from trainer.data.randomness import root_key


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
