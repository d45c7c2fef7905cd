from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.data_set.shard_index import ShardIndex
from trainer.data.batch import IGNORED
from trainer.data.packing import SEGMENT_A, SEGMENT_B
from trainer.data.pair_rows import PairPlan, PairRows
from trainer.data.randomness import root_key
from trainer.data.sentence_pairs import (
    IN_ORDER,
    IS_NEXT,
    IS_RANDOM,
    IS_SWAPPED,
    SPECIAL_PLACES,
    PairTask,
    fit_pairs,
    max_pair_sequences,
    max_pairs_in_row,
    plan_pairs,
)

IndexMaker = Callable[..., ShardIndex]
ONE_RECORD = 1 << 18
"""Place of the first token of `make_index` at 4 bytes a token."""


def halves(plan: PairPlan) -> list[tuple[range, range, int]]:
    """The tokens of A and of B, counted from the shard's first, and the label; shards of one record."""
    starts, lengths = plan.starts - ONE_RECORD, plan.lengths
    return [
        (range(a, a + a_length), range(b, b + b_length), label)
        for (a, b), (a_length, b_length), label in zip(
            starts.tolist(), lengths.tolist(), plan.labels.tolist(), strict=True
        )
    ]


def truncate_one_by_one(a: int, b: int, capacity: int) -> tuple[int, int]:
    """Devlin et al. 2018: a token at a time from the longer half, from B where both are equal."""
    while a + b > capacity:
        if a > b:
            a -= 1
        else:
            b -= 1
    return a, b


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1), st.integers(5, 50))
def test_pairs_are_shortened_as_by_one_token_at_a_time(lengths: list[tuple[int, int]], capacity: int) -> None:
    fitted = fit_pairs(np.array(lengths), capacity)
    assert fitted.tolist() == [list(truncate_one_by_one(a, b, capacity)) for a, b in lengths]


def test_a_document_of_two_sentences_is_one_pair(index_of: IndexMaker) -> None:
    index = index_of([[3, 4], [2, 2]], documents_a_record=2)
    labels = set()
    for seed in range(20):
        for a, b, label in halves(plan_pairs(index, 4, 32, 0.0, root_key(seed))):
            labels.add(label)
            if label == IS_NEXT:
                assert (a, b) in [(range(3), range(3, 7)), (range(7, 9), range(9, 11))]
            else:
                assert (a.start < 7) != (b.start < 7)
    assert labels == {IS_NEXT, IS_RANDOM}


documents = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=12), min_size=2, max_size=12)


@settings(max_examples=60, deadline=None)
@given(documents, st.integers(16, 64), st.integers(0, 100))
def test_every_sentence_is_used_once_and_pairs_are_what_they_say(
    index_of: IndexMaker, documents: list[list[int]], sequence_length: int, seed: int
) -> None:
    index = index_of(documents, documents_a_record=len(documents))
    plan = plan_pairs(index, 4, sequence_length, 0.1, root_key(seed))
    document_of = np.repeat(np.arange(len(documents)), index.document_lengths)
    sentence_of = np.repeat(np.arange(len(index.sentence_lengths)), index.sentence_lengths)
    used_sentences: list[int] = []
    for a, b, label in halves(plan):
        assert len(a) and len(b) and len(a) + len(b) + SPECIAL_PLACES <= sequence_length
        assert len(set(document_of[a])) == len(set(document_of[b])) == 1, "no half crosses a document"
        used_sentences += set(sentence_of[a])
        if label == IS_NEXT:
            assert document_of[a.start] == document_of[b.start]
            # Truncation may cut A's end and B's front.
            assert sentence_of[a[-1]] < sentence_of[b.start]
            used_sentences += set(sentence_of[b])
        else:
            assert document_of[a.start] != document_of[b.start]
    assert len(used_sentences) == len(set(used_sentences)), "no sentence is used twice but as a random B"
    # A sentence is missing only where truncation took the whole of it.
    missing = set(range(len(index.sentence_lengths))) - set(used_sentences)
    assert sum(index.sentence_lengths[sorted(missing)]) <= plan.counts.truncated_tokens
    assert plan.counts.pairs == len(plan.labels)
    assert plan.counts.random_pairs == (plan.labels == IS_RANDOM).sum()
    assert plan.counts.dropped_chunks == 0


@settings(max_examples=30, deadline=None)
@given(documents, st.integers(0, 100))
def test_nothing_is_lost_where_nothing_is_truncated(
    index_of: IndexMaker, documents: list[list[int]], seed: int
) -> None:
    index = index_of(documents, documents_a_record=len(documents))
    plan = plan_pairs(index, 4, 2048, 0.0, root_key(seed))
    assert plan.counts.truncated_tokens == 0
    assert all(a.stop == b.start for a, b, label in halves(plan) if label == IS_NEXT), "B follows A at once"
    used = sorted(token for a, b, label in halves(plan) for token in ([*a, *b] if label == IS_NEXT else a))
    assert used == list(range(int(index.document_lengths.sum())))


@settings(max_examples=30, deadline=None)
@given(documents, st.integers(16, 64))
def test_rows_hold_whole_pairs(index_of: IndexMaker, documents: list[list[int]], sequence_length: int) -> None:
    index = index_of(documents, documents_a_record=len(documents))
    plans = [plan_pairs(index, 4, sequence_length, 0.1, root_key(seed)) for seed in (1, 2)]
    rows = PairRows(plans)
    assert rows.num_rows == sum(plan.counts.rows for plan in plans)
    segments = rows.segments(np.arange(rows.num_rows))
    used = np.bincount(segments.rows, weights=segments.lengths + 1 + (segments.types == SEGMENT_A))
    assert len(used) == rows.num_rows
    assert ((used > 0) & (used <= sequence_length)).all()
    assert np.bincount(segments.rows).max() <= 2 * max_pairs_in_row(sequence_length)
    assert segments.types.tolist() == [SEGMENT_A, SEGMENT_B] * sum(plan.counts.pairs for plan in plans)
    assert used.sum() == sum(plan.counts.filled_places for plan in plans)
    # Any order of asking gives the same rows.
    last = rows.segments(np.array([rows.num_rows - 1, 0]))
    assert last.starts[last.rows == 1].tolist() == segments.starts[segments.rows == 0].tolist()
    assert last.shards[last.rows == 0].tolist() == segments.shards[segments.rows == rows.num_rows - 1].tolist()


@pytest.mark.parametrize("sequence_length", [128, 512])
def test_pairs_of_text_as_in_the_wild(
    index_of: IndexMaker, documents_of: Callable[..., list], sequence_length: int
) -> None:
    index = index_of(documents_of(np.random.default_rng(0), 4000), documents_a_record=100)
    plan = plan_pairs(index, 4, sequence_length, 0.1, root_key(0))
    counts = plan.counts
    judged = counts.pairs - counts.single_sentence_chunks
    assert abs((counts.random_pairs - counts.single_sentence_chunks) / judged - 0.5) < 5 * 0.5 / np.sqrt(judged)
    assert counts.filled_places / (counts.rows * sequence_length) > 0.97


def test_short_targets_make_short_pairs(index_of: IndexMaker) -> None:
    index = index_of([[1] * 4000, [1] * 4000], documents_a_record=2)
    capacity = 128 - SPECIAL_PLACES
    none = plan_pairs(index, 4, 128, 0.0, root_key(0))
    assert (none.lengths.sum(1) == capacity).mean() > 0.9
    always = plan_pairs(index, 4, 128, 1.0, root_key(0)).lengths.sum(1)
    # Uniform from 2 to the capacity.
    assert abs(always.mean() - (2 + capacity) / 2) < 10
    tenth = plan_pairs(index, 4, 128, 0.1, root_key(0)).lengths.sum(1)
    assert 0.04 < (tenth < capacity).mean() < 0.25


def test_tokens_are_cut_at_the_front_and_at_the_end(index_of: IndexMaker) -> None:
    index = index_of([[200, 200]] * 200, documents_a_record=200)
    plan = plan_pairs(index, 4, 128, 0.0, root_key(3))
    fronts = [a.start % 400 for a, _, _ in halves(plan)]
    # 138 tokens are cut from an A of 200, each with a fair coin at the front.
    assert abs(np.mean([front % 200 for front in fronts]) - 69) < 2
    assert np.std([front % 200 for front in fronts]) == pytest.approx(np.sqrt(138) / 2, rel=0.2)


def test_pieces_of_one_split_document_are_not_another_document(index_of: IndexMaker) -> None:
    index = index_of([[5, 5]] * 60, documents_a_record=60)
    ids = np.maximum(np.arange(60) - 29, 0).astype(np.uint64)  # 30 pieces of one document, and 30 others
    index = dataclasses.replace(index, document_ids=ids)
    drawn = [
        (a.start // 10, b.start // 10)
        for seed in range(10)
        for a, b, label in halves(plan_pairs(index, 4, 64, 0.0, root_key(seed)))
        if label == IS_RANDOM
    ]
    assert all(ids[own] != ids[other] for own, other in drawn)
    # All others are drawn alike.
    for_pieces = np.bincount([other for own, other in drawn if own < 30])
    assert for_pieces.sum() > 100 and for_pieces.max() < 0.1 * for_pieces.sum()
    nearly_one = dataclasses.replace(index, document_ids=(np.arange(60) == 7).astype(np.uint64))
    drawn = [pair for pair in halves(plan_pairs(nearly_one, 4, 64, 0.0, root_key(0))) if pair[2] == IS_RANDOM]
    assert len(drawn) > 10 and all((a.start // 10 == 7) != (b.start // 10 == 7) for a, b, _ in drawn)


def test_a_shard_of_one_document_gives_true_pairs_only(index_of: IndexMaker) -> None:
    plan = plan_pairs(index_of([[5, 5, 5, 5, 5]]), 4, 16, 0.0, root_key(0))
    assert len(plan.labels) and not plan.labels.any()
    alone = plan_pairs(index_of([[5]]), 4, 16, 0.0, root_key(0))
    assert (alone.counts.pairs, alone.counts.rows, alone.counts.dropped_chunks) == (0, 0, 1)
    assert alone.counts.truncated_tokens == 5


def test_a_plan_is_a_pure_function_of_its_key(index_of: IndexMaker, documents_of: Callable[..., list]) -> None:
    index = index_of(documents_of(np.random.default_rng(1), 50))
    first, again, other = (plan_pairs(index, 4, 128, 0.1, root_key(seed)) for seed in (0, 0, 1))
    assert halves(first) == halves(again)
    assert np.array_equal(first.row_starts, again.row_starts)
    assert halves(first) != halves(other)


@settings(max_examples=60, deadline=None)
@given(documents, st.integers(16, 64), st.integers(0, 100))
def test_sentence_order_uses_every_sentence_once_and_swaps_half(
    index_of: IndexMaker, documents: list[list[int]], sequence_length: int, seed: int
) -> None:
    index = index_of(documents, documents_a_record=len(documents))
    plan = plan_pairs(index, 4, sequence_length, 0.1, root_key(seed), "sentence_order")
    document_of = np.repeat(np.arange(len(documents)), index.document_lengths)
    used: list[int] = []
    for a, b, label in halves(plan):
        assert len(a) + len(b) + SPECIAL_PLACES - (not b) <= sequence_length and len(a)
        assert (label == IGNORED) == (not b)
        used += [*a, *b]
        if b:
            first, second = (a, b) if label == IN_ORDER else (b, a)
            assert document_of[first[0]] == document_of[second[-1]] and first[-1] < second[0]
    assert len(used) == len(set(used)) == sum(index.document_lengths) - plan.counts.truncated_tokens
    counts = plan.counts
    assert counts.pairs + counts.single_sentence_chunks == len(plan.labels)
    assert counts.swapped_pairs == (plan.labels == IS_SWAPPED).sum() and not counts.random_pairs


def test_half_of_the_pairs_are_swapped(index_of: IndexMaker, documents_of: Callable[..., list]) -> None:
    plan = plan_pairs(index_of(documents_of(np.random.default_rng(0), 400)), 4, 128, 0.1, root_key(0), "sentence_order")
    assert plan.counts.pairs > 1000
    assert abs(plan.counts.swapped_pairs / plan.counts.pairs - 0.5) < 5 * 0.5 / np.sqrt(plan.counts.pairs)


@pytest.mark.parametrize(
    ("task", "documents", "most"),
    [
        ("next_sentence", [[1, 1]] * 4, 24 // 5),  # [CLS] a [SEP] b [SEP]
        ("sentence_order", [[1]] * 8, 24 // 3),  # [CLS] a [SEP]
    ],
)
def test_the_capacity_of_a_row_is_that_of_its_shortest_sequences(
    index_of: IndexMaker, task: PairTask, documents: list[list[int]], most: int
) -> None:
    """Rows of 24 positions; one sequence more than `most` is the padding that closes a row."""
    plan = plan_pairs(index_of(documents, documents_a_record=len(documents)), 4, 24, 0.0, root_key(1), task)
    assert np.diff(plan.row_starts).max() == most
    assert max_pair_sequences(24, task) == most + 1
