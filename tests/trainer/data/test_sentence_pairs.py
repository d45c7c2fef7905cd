from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.dataset.shards import ShardIndex
from trainer.data import sentence_pairs
from trainer.data.batch import IGNORED
from trainer.data.packing import SEGMENT_A, SEGMENT_B, SPECIAL_POSITIONS, RowSettings
from trainer.data.pair_rows import PairPlan, PairRows
from trainer.data.randomness import root_key
from trainer.data.sentence_pairs import (
    IS_NEXT,
    IS_RANDOM,
    IS_SWAPPED,
    PairTask,
    fit_pairs,
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
    index = index_of([[3, 4], [2, 4]], documents_a_record=2)
    kept, exchanged = [(range(3), range(3, 7)), (range(7, 9), range(9, 13))], [
        (range(3), range(9, 13)), (range(7, 9), range(3, 7)),
    ]  # fmt: skip
    labels = set()
    for seed in range(20):
        pairs = sorted(halves(plan_pairs(index, 4, 32, 0.0, root_key(seed))), key=lambda pair: pair[0].start)
        label = pairs[0][2]
        assert pairs == [(a, b, label) for a, b in (kept if label == IS_NEXT else exchanged)]
        labels.add(label)
    assert labels == {IS_NEXT, IS_RANDOM}


def test_the_longer_of_two_exchanged_halves_is_cut_and_its_tail_stands_alone(index_of: IndexMaker) -> None:
    index = index_of([[3, 4], [2, 6]], documents_a_record=2)
    labels = set()
    for seed in range(20):
        pairs = sorted(halves(plan_pairs(index, 4, 32, 0.0, root_key(seed))), key=lambda pair: pair[0].start)
        first, second = (range(3, 7), range(9, 13)) if pairs[0][2] == IS_NEXT else (range(9, 13), range(3, 7))
        assert pairs[:2] == [(range(3), first, pairs[0][2]), (range(7, 9), second, pairs[0][2])]
        (tail, nothing, label) = pairs[2]
        assert (tail, len(nothing), label) == (range(13, 15), 0, IGNORED)
        labels.add(pairs[0][2])
    assert labels == {IS_NEXT, IS_RANDOM}


documents = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=12), min_size=2, max_size=12)


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(documents, st.integers(16, 64), st.integers(0, 100))
def test_every_sentence_is_used_once_and_pairs_are_what_they_say(
    index_of: IndexMaker, documents: list[list[int]], sequence_length: int, seed: int
) -> None:
    index = index_of(documents, documents_a_record=len(documents))
    plan = plan_pairs(index, 4, sequence_length, 0.1, root_key(seed))
    document_of = np.repeat(np.arange(len(documents)), index.document_lengths)
    sentence_of = np.repeat(np.arange(len(index.sentence_lengths)), index.sentence_lengths)
    used: list[int] = []
    for a, b, label in halves(plan):
        assert len(a) and len(a) + len(b) + SPECIAL_POSITIONS - (not b) <= sequence_length
        assert len(set(document_of[a])) == 1, "no half crosses a document"
        used += [*a, *b]
        if not b:
            assert label == IGNORED
        elif label == IS_RANDOM:
            assert len(set(document_of[b])) == 1 and document_of[a.start] != document_of[b.start]
        else:
            assert document_of[a.start] == document_of[b[-1]]
            # Truncation may cut A's end and B's front.
            assert sentence_of[a[-1]] < sentence_of[b.start]
    assert len(used) == len(set(used)) == index.document_lengths.sum() - plan.counts.truncated_tokens
    assert plan.counts.pairs == (plan.labels != IGNORED).sum()
    assert plan.counts.random_pairs == (plan.labels == IS_RANDOM).sum() and not plan.counts.swapped_pairs
    assert plan.counts.unlabeled_pairs == ((plan.labels == IGNORED) & (plan.lengths[:, 1] > 0)).sum()


@settings(max_examples=30, deadline=None)
@given(documents, st.integers(0, 100))
def test_nothing_is_lost_where_nothing_is_truncated(
    index_of: IndexMaker, documents: list[list[int]], seed: int
) -> None:
    index = index_of(documents, documents_a_record=len(documents))
    plan = plan_pairs(index, 4, 2048, 0.0, root_key(seed))
    assert plan.counts.truncated_tokens == 0
    assert all(a.stop == b.start for a, b, label in halves(plan) if label == IS_NEXT), "B follows A at once"
    used = sorted(token for a, b, _ in halves(plan) for token in [*a, *b])
    assert used == list(range(int(index.document_lengths.sum())))


@settings(max_examples=30, deadline=None)
@given(documents, st.integers(16, 64))
def test_rows_hold_whole_pairs(index_of: IndexMaker, documents: list[list[int]], sequence_length: int) -> None:
    index = index_of(documents, documents_a_record=len(documents))
    plans = [plan_pairs(index, 4, sequence_length, 0.1, root_key(seed)) for seed in (1, 2)]
    rows = PairRows(plans)
    assert rows.num_rows == sum(plan.counts.rows for plan in plans)
    segments = rows.segments_of_rows(np.arange(rows.num_rows))
    used = np.bincount(segments.rows, weights=segments.lengths + 1 + (segments.types == SEGMENT_A))
    num_singles = sum(int((plan.lengths[:, 1] == 0).sum()) for plan in plans)
    assert len(used) == rows.num_rows
    assert ((used > 0) & (used <= sequence_length)).all()
    num_pairs = np.bincount(segments.rows, weights=segments.types == SEGMENT_B)
    assert num_pairs.max() <= RowSettings(sequence_length, "next_sentence").max_pairs
    assert num_pairs.sum() + num_singles == (segments.types == SEGMENT_A).sum()
    assert (segments.types[np.flatnonzero(segments.types == SEGMENT_B) - 1] == SEGMENT_A).all()
    assert used.sum() == sum(plan.counts.filled_positions for plan in plans)
    # Any order of asking gives the same rows.
    last = rows.segments_of_rows(np.array([rows.num_rows - 1, 0]))
    assert last.starts[last.rows == 1].tolist() == segments.starts[segments.rows == 0].tolist()
    assert last.shards[last.rows == 0].tolist() == segments.shards[segments.rows == rows.num_rows - 1].tolist()


@pytest.mark.parametrize("sequence_length", [128, 512])
def test_pairs_of_text_as_in_the_wild(
    index_of: IndexMaker, documents_of: Callable[..., list], sequence_length: int
) -> None:
    index = index_of(documents_of(np.random.default_rng(0), 4000), documents_a_record=100)
    plan = plan_pairs(index, 4, sequence_length, 0.1, root_key(0))
    counts = plan.counts
    # A coin labels two pairs.
    assert abs(counts.random_pairs / counts.pairs - 0.5) < 5 * 0.5 / np.sqrt(counts.pairs / 2)
    assert counts.unlabeled_pairs < 0.01 * counts.pairs
    assert counts.filled_positions / (counts.rows * sequence_length) > 0.97


def test_short_targets_make_short_pairs(index_of: IndexMaker) -> None:
    index = index_of([[1] * 4000] * 40, documents_a_record=40)
    capacity = 128 - SPECIAL_POSITIONS
    none = plan_pairs(index, 4, 128, 0.0, root_key(0))
    assert (none.lengths.sum(1) == capacity).mean() > 0.9
    always = plan_pairs(index, 4, 128, 1.0, root_key(0)).lengths.sum(1)
    # Uniform from 2 to the capacity.
    assert abs(always.mean() - (2 + capacity) / 2) < 10
    tenth = plan_pairs(index, 4, 128, 0.1, root_key(0)).lengths.sum(1)
    assert 0.04 < (tenth < capacity).mean() < 0.25


def test_tokens_are_cut_at_the_front_and_at_the_end(index_of: IndexMaker) -> None:
    plan = plan_pairs(index_of([[400, 400]] * 200, documents_a_record=200), 4, 512, 0.0, root_key(3))
    fronts = [a.start % 800 for a, b, _ in halves(plan) if b]
    # 145 or 146 tokens are cut from an A of 400, each with a fair coin at the front.
    assert abs(np.mean(fronts) - 145.5 / 2) < 2
    assert np.std(fronts) == pytest.approx(np.sqrt(145.5) / 2, rel=0.2)
    # Neither half is the longer one by rule.
    assert 60 < sum(len(a) > len(b) for a, b, _ in halves(plan) if b) < 140


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
    num_random = 0
    for seed in range(20):
        pairs = halves(plan_pairs(nearly_one, 4, 64, 0.0, root_key(seed)))
        drawn = [pair for pair in pairs if pair[2] == IS_RANDOM]
        assert all((a.start // 10 == 7) != (b.start // 10 == 7) for a, b, _ in drawn)
        assert sum(label != IGNORED for _, _, label in pairs) == 2
        num_random += len(drawn)
    assert 0 < num_random < 40


def test_a_shard_of_one_document_has_no_labels_and_loses_no_text(index_of: IndexMaker) -> None:
    for document in ([5, 5, 5, 5, 5], [5]):
        plan = plan_pairs(index_of([document]), 4, 64, 0.0, root_key(0))
        assert (plan.labels == IGNORED).all() and not plan.counts.pairs
        assert plan.lengths.sum() == sum(document)


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
        assert len(a) + len(b) + SPECIAL_POSITIONS - (not b) <= sequence_length and len(a)
        assert label == IGNORED or b
        used += [*a, *b]
        if b:
            first, second = (b, a) if label == IS_SWAPPED else (a, b)
            assert document_of[first[0]] == document_of[second[-1]] and first[-1] < second[0]
    assert len(used) == len(set(used)) == sum(index.document_lengths) - plan.counts.truncated_tokens
    counts = plan.counts
    assert counts.pairs + counts.unlabeled_pairs + counts.single_sentence_chunks == len(plan.labels)
    assert counts.pairs == (plan.labels != IGNORED).sum()
    assert counts.swapped_pairs == (plan.labels == IS_SWAPPED).sum() and not counts.random_pairs


def test_half_of_the_pairs_are_swapped(index_of: IndexMaker, documents_of: Callable[..., list]) -> None:
    plan = plan_pairs(index_of(documents_of(np.random.default_rng(0), 400)), 4, 128, 0.1, root_key(0), "sentence_order")
    assert plan.counts.pairs > 1000
    assert abs(plan.counts.swapped_pairs / plan.counts.pairs - 0.5) < 5 * 0.5 / np.sqrt(plan.counts.pairs)


def facts_of_pairs(index: ShardIndex, sequence_length: int, task: PairTask, least: int) -> tuple[dict, np.ndarray]:
    """Of at least `least` labeled pairs, what their labels must not depend on, each (N,), and the labels.

    The plans of as many epochs as that takes. A position is that of the first token in its document, in tokens and as a
    share. That of a pair in the wrong order is the position of the earlier half.
    """
    facts: dict[str, list[np.ndarray]] = {}
    labels: list[np.ndarray] = []
    for seed in range(100):
        if sum(map(len, labels)) >= least:
            break
        plan = plan_pairs(index, 4, sequence_length, 0.1, root_key(seed), task)
        labeled = plan.labels != IGNORED
        starts, (a, b) = plan.starts[labeled], plan.lengths[labeled].T
        in_document, shares = positions(index, starts)
        found = {"|A|": a, "|B|": b, "|A| + |B|": a + b, "|A| - |B|": a - b}
        if task == "next_sentence":
            found |= {"position of A": in_document[:, 0], "position of B": in_document[:, 1]}
            found |= {"share of A": shares[:, 0], "share of B": shares[:, 1]}
        else:
            found |= {"position": in_document.min(axis=1), "share": shares.min(axis=1)}
        for name, values in found.items():
            facts.setdefault(name, []).append(values)
        labels.append(plan.labels[labeled])
    return {name: np.concatenate(values) for name, values in facts.items()}, np.concatenate(labels)


def positions(index: ShardIndex, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens before each of `starts` in its document, and their share of the document's tokens."""
    ends = np.cumsum(index.document_lengths.astype(np.int64))
    documents = np.searchsorted(ends, starts - ONE_RECORD, side="right")
    before = starts - ONE_RECORD - (ends - index.document_lengths)[documents]
    return before, before / index.document_lengths[documents]


def auc(values: np.ndarray, labels: np.ndarray) -> float:
    """The probability that a pair of label 1 has the greater value than one of label 0, a tie counting half."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    ones = int(labels.sum())
    return float((ranks[labels == 1].sum() - ones * (ones + 1) / 2) / (ones * (len(labels) - ones)))


def chi_square(values: np.ndarray, labels: np.ndarray) -> float:
    """Of the labels in 16 bins of equally many values, at most 15 degrees of freedom."""
    bins = np.searchsorted(np.unique(np.quantile(values, np.arange(1, 16) / 16)), values)
    counts, ones, share = np.bincount(bins), np.bincount(bins, weights=labels), labels.mean()
    return float(((ones - counts * share) ** 2 / np.maximum(counts, 1)).sum() / (share * (1 - share)))


def dependences(facts: dict[str, np.ndarray], labels: np.ndarray) -> dict[str, tuple[float, float]]:
    """(AUC, chi-square) of the facts that say something of the label.

    The bounds: 4 standard errors of the AUC, and what chi-square with 15 degrees of freedom exceeds once in 10,000
    times. Both are those of half as many pairs, for one coin labels two.
    """
    auc_bound = 4 * np.sqrt(2 * (len(labels) + 1) / (12 * labels.sum() * (1 - labels).sum()))
    found = {name: (auc(values, labels), chi_square(values, labels)) for name, values in facts.items()}
    return {name: (a, chi) for name, (a, chi) in found.items() if abs(a - 0.5) > auc_bound or chi > 2 * 44.3}


def kinds_of_documents(draw_wild: Callable[..., list]) -> dict[str, tuple[list[list[int]], int]]:
    """Documents whose lengths tempt a plan to betray its labels, and a sequence length."""
    generator = np.random.default_rng(5)

    def draw(low: int, high: int, num_sentences: int) -> list[int]:
        return generator.integers(low, high, num_sentences).tolist()

    return {
        "wild": (draw_wild(generator, 1500), 128),
        "wild, short rows": (draw_wild(generator, 1500), 64),
        "one or two sentences": ([draw(5, 40, 1 + number % 2) for number in range(6000)], 128),
        "a short title first": ([[*draw(3, 9, 1), *draw(20, 50, 1 + number % 12)] for number in range(3000)], 128),
        "very long sentences": ([draw(100, 2000, 1 + number % 30) for number in range(1500)], 512),
        "two kinds of text": ([draw(3, 9, 60) if number % 2 else draw(40, 90, 6) for number in range(2000)], 64),
    }


@pytest.mark.parametrize("task", ["next_sentence", "sentence_order"])
@pytest.mark.parametrize("kind", kinds_of_documents(lambda *_: []))
def test_labels_are_independent_of_lengths_and_positions(
    index_of: IndexMaker, documents_of: Callable[..., list], kind: str, task: PairTask
) -> None:
    """Measured on 2.6 million tokens of books, abstracts, law and documentation (8 shards, 4 epochs, length 64):

    next_sentence: AUC of |A| and |B| 0.547 and 0.445, 59.9% random pairs, where a random B was drawn afresh and met
    every single sentence; 0.501 and 0.499, 50.1%, as it is. sentence_order: 0.600 and 0.401 where every pair had a coin
    of its own; 0.500 and 0.500, as it is.
    """
    documents, sequence_length = kinds_of_documents(documents_of)[kind]
    index = index_of(documents, documents_a_record=len(documents))
    facts, labels = facts_of_pairs(index, sequence_length, task, 10_000)
    assert len(labels) >= 10_000
    assert abs(labels.mean() - 0.5) < 4 * 0.5 / np.sqrt(len(labels) / 2)
    assert dependences(facts, labels) == {}


def test_a_label_from_the_hash_of_the_cut_is_noticed(
    index_of: IndexMaker, documents_of: Callable[..., list], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the cut and the label share a draw, B is random whenever A is the shorter part."""
    monkeypatch.setattr(sentence_pairs, "_LABEL", sentence_pairs._CUT)
    index = index_of(documents_of(np.random.default_rng(5), 1500), documents_a_record=1500)
    found = dependences(*facts_of_pairs(index, 128, "next_sentence", 10_000))
    assert {"|A|", "|B|", "|A| - |B|"} <= found.keys()


@pytest.mark.parametrize(
    ("task", "documents", "most"),
    [
        ("next_sentence", [[1, 1]] * 4, 24 // 5),  # [CLS] a [SEP] b [SEP]
        ("sentence_order", [[1]] * 8, 24 // 3),  # [CLS] a [SEP]
    ],
)
def test_a_row_contains_as_many_of_the_shortest_sequences_as_fit(
    index_of: IndexMaker, task: PairTask, documents: list[list[int]], most: int
) -> None:
    """Rows of 24 positions."""
    plan = plan_pairs(index_of(documents, documents_a_record=len(documents)), 4, 24, 0.0, root_key(1), task)
    assert np.diff(plan.row_starts).max() == most


@pytest.mark.parametrize(("task", "second_starts"), [("next_sentence", {18}), ("sentence_order", {12, 18})])
def test_sentence_order_gathers_half_of_the_documents_from_their_end(
    index_of: IndexMaker, task: PairTask, second_starts: set[int]
) -> None:
    """Documents of five sentences of 6 tokens, three in a row: the short chunk of two is the last or the first."""
    index = index_of([[6] * 5] * 40, documents_a_record=40)
    plan = plan_pairs(index, 4, 18 + SPECIAL_POSITIONS, 0.0, root_key(1), task)
    firsts = [min(a.start, b.start) if task == "sentence_order" else a.start for a, b, _ in halves(plan) if len(b)]
    counts = Counter(first % 30 for first in firsts)
    assert set(counts) == {0, *second_starts} and counts[0] == 40
    assert all(counts[start] > 10 for start in second_starts)
