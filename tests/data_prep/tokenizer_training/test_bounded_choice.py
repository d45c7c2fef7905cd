"""A bounded choice by keys: independent of order and of how the documents are parted, tempered by weights."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.tokenizer_training.bounded_choice import EVEN, Choice, key_of, tempering

Offers = list[tuple[int, int]]  # (hash, bytes)


def chosen(offers: Offers, budget: int, multipliers: dict[int, int] | None = None) -> dict[int, int]:
    choice = Choice(budget)
    for document_hash, num_bytes in offers:
        multiplier = (multipliers or {}).get(document_hash, EVEN)
        choice.offer(document_hash, key_of(document_hash, multiplier), num_bytes)
    return {document_hash: key for key, document_hash in choice.keys()}


def test_the_smallest_keys_that_just_fill_the_budget_are_chosen() -> None:
    offers = [(50, 10), (10, 4), (30, 4), (20, 4), (40, 4)]
    assert list(chosen(offers, 10)) == [10, 20, 30]
    assert list(chosen(offers, 12)) == [10, 20, 30]
    assert list(chosen(offers, 13)) == [10, 20, 30, 40]
    assert list(chosen(offers, 1)) == [10]
    assert list(chosen(offers, 1_000)) == [10, 20, 30, 40, 50]


def test_what_leaves_is_told_and_the_limit_refuses_the_rest() -> None:
    choice = Choice(10)
    assert choice.offer(5, key_of(5, EVEN), 10) == (True, [])
    assert choice.offer(3, key_of(3, EVEN), 9) == (True, [])
    assert choice.offer(1, key_of(1, EVEN), 2) == (True, [5])
    assert choice.limit == key_of(5, EVEN) and choice.num_bytes == 11 and len(choice) == 2
    assert choice.offer(6, key_of(6, EVEN), 1) == (False, [])
    assert 3 in choice and 5 not in choice


def test_a_text_offered_again_counts_once_with_its_smallest_key() -> None:
    choice = Choice(10)
    for key, taken in ((7, True), (9, False), (7, False), (2, True)):
        assert choice.offer(1, key, 6)[0] is taken
    assert choice.num_bytes == 6 and list(choice.keys()) == [(2, 1)]
    choice.offer(2, 5, 6)
    assert choice.offer(3, 4, 6) == (True, [2])
    assert list(choice.keys()) == [(2, 1), (4, 3)]


OFFERS = st.dictionaries(st.integers(0, 2**64 - 1), st.integers(1, 50), max_size=40).map(lambda d: list(d.items()))


@given(OFFERS, st.integers(1, 400), st.integers(1, 6), st.randoms(use_true_random=False))
def test_parts_merge_into_the_choice_of_the_whole(offers: Offers, budget: int, parts: int, draw: random.Random) -> None:
    multipliers = {document_hash: draw.choice((1 << 30, 1 << 32)) for document_hash, _ in offers}
    whole = chosen(offers, budget, multipliers)
    draw.shuffle(offers)
    sizes = dict(offers)
    merged: Offers = []
    for part in range(parts):
        merged.extend((h, sizes[h]) for h in chosen(offers[part::parts], budget, multipliers))
    draw.shuffle(merged)
    assert chosen(merged, budget, multipliers) == whole
    in_order = sorted((key_of(h, multipliers[h]), size) for h, size in offers)
    before_last = sum(size for _, size in in_order[: max(0, len(whole) - 1)])
    assert before_last < budget or not whole
    assert len(whole) == len(offers) or sum(size for _, size in in_order[: len(whole)]) >= budget


def test_tempering_is_a_power_of_the_share() -> None:
    assert tempering({"a": 90, "b": 10}, 1.0) == {"a": EVEN, "b": EVEN}
    assert tempering({"a": 90, "b": 10, "none": 0}, 0.0) == {"a": EVEN * 9 // 10, "b": EVEN // 10}
    half = tempering({"a": 75, "b": 25}, 0.5)
    assert half["b"] == EVEN // 2 and half["a"] == pytest.approx(EVEN * 0.75**0.5, abs=1)
    assert tempering({"tiny": 1, "huge": 10**18}, 0.0)["tiny"] >= 1


@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.0])
def test_shares_of_a_small_sample_follow_alpha(alpha: float) -> None:
    draw = random.Random(3)
    group_of = {draw.getrandbits(64): "large" if number % 10 else "small" for number in range(20_000)}
    totals = {"large": 18_000, "small": 2_000}
    by_group = tempering(totals, alpha)
    multipliers = {document_hash: by_group[group] for document_hash, group in group_of.items()}
    sample = chosen([(h, 1) for h in group_of], 2_000, multipliers)
    expected = 0.1**alpha / (0.1**alpha + 0.9**alpha)
    # A share of 2,000 draws has a standard deviation of at most 0.011.
    assert sum(group_of[h] == "small" for h in sample) / 2_000 == pytest.approx(expected, abs=0.035)
