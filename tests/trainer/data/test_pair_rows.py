from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.pair_rows import pack_rows


def test_small_items_fill_what_large_ones_leave() -> None:
    rows = pack_rows(np.array([3, 8, 5, 10, 2, 2]), 10)
    assert rows[3] not in rows[[0, 1, 2, 4, 5]]
    assert rows[1] == rows[4] or rows[1] == rows[5]
    assert rows.max() == 2


def test_items_of_one_size_share_a_row() -> None:
    rows = pack_rows(np.full(7, 3), 10)
    assert sorted(np.bincount(rows).tolist()) == [1, 3, 3]


def test_no_sequences_need_no_row() -> None:
    assert len(pack_rows(np.empty(0, np.int64), 10)) == 0


@given(st.lists(st.integers(5, 64), min_size=1, max_size=200))
def test_no_row_is_over_full_and_none_is_empty(sizes: list[int]) -> None:
    rows = pack_rows(np.array(sizes), 64)
    used = np.bincount(rows, weights=sizes)
    assert (used <= 64).all()
    assert (used > 0).all()
    # Best fit decreasing needs at most 11/9 of the fewest rows, and four more (Johnson 1973).
    assert len(used) <= 11 / 9 * np.ceil(sum(sizes) / 64 * 2) + 4


def fill_levels_one_by_one(sizes: list[int], sequence_length: int) -> list[int]:
    """Best fit decreasing as it is published: each item goes to the fullest row that still has room for it."""
    rows: list[int] = []
    for size in sorted(sizes, reverse=True):
        open_rows = [row for row, used in enumerate(rows) if used + size <= sequence_length]
        if open_rows:
            rows[max(open_rows, key=lambda row: rows[row])] += size
        else:
            rows.append(size)
    return sorted(rows)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=120))
def test_rows_are_as_full_as_by_one_item_at_a_time(sizes: list[int]) -> None:
    rows = pack_rows(np.array(sizes), 20)
    assert sorted(np.bincount(rows, weights=sizes).tolist()) == fill_levels_one_by_one(sizes, 20)
