"""One pass: what it has fetched ahead."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from data_prep.data_set.shard_index import ShardIndex
from trainer.data.order import WINDOW_SHARDS
from trainer.data.passes import Pass, RowSettings
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
    one_pass = Pass(shards, RowSettings(8, None, 0.0), root_key(1))
    seen = []
    for window in range(4):
        fetched.clear()
        _, (shard, *_) = one_pass.segments(np.array([window * WINDOW_SHARDS]))
        assert len(set(fetched)) == len(fetched) and shard.prefetch
        seen.append(set(fetched))
    assert [len(numbers) for numbers in seen] == [2 * WINDOW_SHARDS] * 3 + [WINDOW_SHARDS]
    assert [len(a & b) for a, b in zip(seen, seen[1:], strict=False)] == [WINDOW_SHARDS] * 3
    assert set.union(*seen) == set(range(4 * WINDOW_SHARDS))
