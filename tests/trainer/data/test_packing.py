from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.dataset.shards import ShardIndex
from trainer.data.packing import DocumentRows, document_starts, expand_ranges, num_document_rows

IndexMaker = Callable[..., ShardIndex]


def pieces(rows: DocumentRows) -> list[list[tuple[int, int, int]]]:
    """(shard, start, length) of every piece of every row."""
    segments = rows.segments_of_rows(np.arange(rows.num_rows))
    found: list[list[tuple[int, int, int]]] = [[] for _ in range(rows.num_rows)]
    columns = (segments.rows, segments.shards, segments.starts, segments.lengths)
    for row, shard, start, length in zip(*(column.tolist() for column in columns), strict=True):
        found[row].append((shard, start, length))
    return found


def test_documents_are_packed_as_worked_out_by_hand(index_of: IndexMaker) -> None:
    # Rows of 8 positions hold 6 of the stream C 0 1 2 S | C 3 4 5 6 7 8 9 S | C 10 S, cut at 6 and 12.
    index = index_of([[3], [7], [1]], documents_a_record=3)
    first = (1 << 20) // 4
    rows = pieces(DocumentRows([index], [4], 8))
    # The first row ends with the [CLS] of the second document, which takes no part in it.
    assert rows == [[(0, first, 3)], [(0, first + 3, 6)], [(0, first + 9, 1), (0, first + 10, 1)]]


def test_documents_are_found_in_their_records(index_of: IndexMaker) -> None:
    index = index_of([[5], [2, 2], [1], [9]], documents_a_record=2, itemsize=2)
    record = (1 << 20) // 2
    assert document_starts(index, 2).tolist() == [record, record + 5, 2 * record, 2 * record + 1]


def test_a_shard_starts_a_row_of_its_own(index_of: IndexMaker) -> None:
    rows = pieces(DocumentRows([index_of([[3]]), index_of([[4]])], [4, 4], 16))
    assert [[shard for shard, *_ in row] for row in rows] == [[0], [1]]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=30), min_size=1, max_size=4), st.integers(8, 40))
def test_every_token_is_in_exactly_one_row(
    index_of: IndexMaker, lengths: list[list[int]], sequence_length: int
) -> None:
    indexes = [index_of([[length] for length in shard], documents_a_record=4) for shard in lengths]
    rows = DocumentRows(indexes, [4] * len(indexes), sequence_length)
    assert rows.num_rows == sum(num_document_rows(sum(shard), len(shard), sequence_length) for shard in lengths)
    found: list[tuple[int, int]] = []
    for row in pieces(rows):
        assert row, "no row is empty"
        used = sum(length + 2 for *_, length in row)
        assert used <= sequence_length
        found += [(shard, start + offset) for shard, start, length in row for offset in range(length)]
    expected = [
        (shard, start + offset)
        for shard, index in enumerate(indexes)
        for start, length in zip(document_starts(index, 4), lengths[shard], strict=True)
        for offset in range(length)
    ]
    assert sorted(found) == sorted(expected)


def test_rows_can_be_requested_in_any_order(index_of: IndexMaker) -> None:
    rows = DocumentRows([index_of([[11], [7], [30], [2], [9]])], [4], 12)
    all_pieces = pieces(rows)
    asked = np.array([4, 0, 3])
    segments = rows.segments_of_rows(asked)
    for position, row in enumerate(asked):
        own = segments.rows == position
        assert segments.starts[own].tolist() == [start for _, start, _ in all_pieces[row]]


@pytest.mark.parametrize("sequence_length", [128, 512])
def test_rows_are_filled(index_of: IndexMaker, documents_of: Callable[..., list], sequence_length: int) -> None:
    index = index_of(documents_of(np.random.default_rng(0), 3000), documents_a_record=100)
    rows = DocumentRows([index], [4], sequence_length)
    segments = rows.segments_of_rows(np.arange(rows.num_rows))
    assert (segments.lengths + 2).sum() / (rows.num_rows * sequence_length) > 0.999


def test_a_hundred_billion_tokens_are_counted_in_closed_form() -> None:
    assert num_document_rows(10**11, 10**8, 512) == -(-(10**11 + 2 * 10**8 - 1) // 510)


def test_ranges_are_expanded() -> None:
    which, numbers = expand_ranges(np.array([10, 5, 7]), np.array([2, 0, 3]))
    assert (which.tolist(), numbers.tolist()) == ([0, 0, 2, 2, 2], [10, 11, 7, 8, 9])
