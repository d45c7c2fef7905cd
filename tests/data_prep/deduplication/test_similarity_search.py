from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.deduplication.similarity_search import (
    MAX_LEADERS,
    Bands,
    band_keys,
    choose_bands,
    clusters,
    mix,
    similar_pairs,
)


def areas(bands: Bands, threshold: Fraction) -> tuple[Fraction, Fraction]:
    """False positives and false negatives, integrated in closed form: (1 - s**r)**b is a polynomial."""

    def integral(start: Fraction, stop: Fraction) -> Fraction:
        return sum(
            (
                Fraction((-1) ** k * math.comb(bands.num_bands, k), bands.rows * k + 1)
                * (stop ** (bands.rows * k + 1) - start ** (bands.rows * k + 1))
                for k in range(bands.num_bands + 1)
            ),
            Fraction(0),
        )

    zero, one = Fraction(0), Fraction(1)
    return threshold - integral(zero, threshold), integral(threshold, one)


# Of datasketch 1.6, which integrates by its own code and is not installed here.
@pytest.mark.parametrize(
    ("threshold", "num_hashes", "weight", "num_bands", "rows"),
    [
        (0.5, 128, 0.5, 25, 5),
        (0.7, 128, 0.5, 14, 9),
        (0.8, 128, 0.5, 9, 13),
        (0.9, 128, 0.5, 5, 25),
        (0.7, 256, 0.5, 25, 10),
        (0.8, 128, 0.9, 14, 9),
        (0.5, 128, 0.9, 32, 4),
        (0.8, 128, 0.98, 17, 7),
        (0.8, 256, 0.98, 28, 9),
    ],
)
def test_the_bands_are_those_that_datasketch_chooses(
    threshold: float, num_hashes: int, weight: float, num_bands: int, rows: int
) -> None:
    assert choose_bands(threshold, num_hashes, weight) == Bands(num_bands, rows)


@pytest.mark.parametrize(("threshold", "weight"), [(0.3, 0.5), (0.6, 0.9), (0.8, 0.98)])
def test_no_other_bands_have_a_smaller_error(threshold: float, weight: float) -> None:
    def error(bands: Bands) -> float:
        false_positive, false_negative = areas(bands, Fraction(threshold))
        return (1 - weight) * float(false_positive) + weight * float(false_negative)

    chosen = choose_bands(threshold, 24, weight)
    others = [Bands(num_bands, rows) for rows in range(1, 25) for num_bands in range(1, 24 // rows + 1)]
    assert len(others) > 60
    assert error(chosen) <= min(map(error, others)) + 1e-6


def test_a_threshold_of_one_asks_for_equal_signatures() -> None:
    assert choose_bands(1.0, 64) == Bands(1, 64)


def test_documents_share_a_key_where_and_only_where_they_agree_in_a_band() -> None:
    bands = Bands(num_bands=3, rows=2)
    signatures = np.array([[1, 2, 3, 4, 5, 6, 9], [1, 2, 3, 5, 5, 6, 8], [2, 1, 4, 3, 1, 2, 9]], np.uint32)
    keys = band_keys(signatures, bands)
    assert keys.shape == (3, 3) and keys.dtype == np.uint64
    np.testing.assert_array_equal(keys[0] == keys[1], [True, False, True])
    # The third holds (1, 2) too, as its last band: another band, another key.
    assert len(np.unique(keys)) == 7


def groups_of(*groups: list[int]) -> tuple[np.ndarray, np.ndarray]:
    keys = np.repeat(np.arange(len(groups)), [len(group) for group in groups]).astype(np.uint64)
    return keys * np.uint64(2**60 + 1), np.concatenate([np.array(group, np.int64) for group in groups])


def always(pairs: np.ndarray) -> np.ndarray:
    return np.ones(len(pairs), bool)


def test_a_group_is_joined_to_its_earliest_document() -> None:
    keys, places = groups_of([7, 3, 5], [1], [2, 5])
    np.testing.assert_array_equal(similar_pairs(keys, places, always), [[2, 5], [3, 5], [3, 7]])


def test_documents_unlike_the_earliest_are_compared_among_themselves() -> None:
    def same_parity(pairs: np.ndarray) -> np.ndarray:
        return pairs[:, 0] % 2 == pairs[:, 1] % 2

    keys, places = groups_of([0, 1, 2, 3, 4, 5])
    np.testing.assert_array_equal(similar_pairs(keys, places, same_parity), [[0, 2], [0, 4], [1, 3], [1, 5]])


def test_an_empty_search_finds_no_pairs() -> None:
    assert similar_pairs(np.empty(0, np.uint64), np.empty(0, np.int64), always).shape == (0, 2)
    assert similar_pairs(*groups_of([1], [2]), always).shape == (0, 2)
    assert [len(part) for part in clusters(np.empty((0, 2), np.int64))] == [0, 0]


@pytest.mark.parametrize("answer", [True, False])
def test_a_group_costs_in_proportion_to_its_size(answer: bool) -> None:
    compared = 0

    def are_similar(pairs: np.ndarray) -> np.ndarray:
        nonlocal compared
        compared += len(pairs)
        return np.full(len(pairs), answer)

    similar_pairs(*groups_of(list(range(20_000))), are_similar)
    assert 0 < compared <= MAX_LEADERS * 20_000


def test_a_pair_that_meets_in_many_bands_is_compared_once() -> None:
    seen: list[list[int]] = []

    def are_similar(pairs: np.ndarray) -> np.ndarray:
        seen.extend(pairs.tolist())
        return np.ones(len(pairs), bool)

    similar_pairs(*groups_of([1, 2], [2, 1], [1, 2]), are_similar)
    assert seen == [[1, 2]]


def naive_clusters(pairs: list[tuple[int, int]]) -> dict[int, int]:
    """A member's least companion, by walking until nothing changes."""
    least = {member: member for pair in pairs for member in pair}
    for _ in least:
        for left, right in pairs:
            least[left] = least[right] = min(least[left], least[right])
    return least


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 25), st.integers(0, 25)), min_size=1, max_size=30))
def test_clusters_are_the_connected_components(pairs: list[tuple[int, int]]) -> None:
    members, roots = clusters(np.array(pairs, np.int64))
    assert dict(zip(members.tolist(), roots.tolist(), strict=True)) == naive_clusters(pairs)
    assert (np.diff(members) > 0).all()


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_chain_of_a_hundred_thousand_is_one_cluster(shuffled: bool) -> None:
    chain = np.random.default_rng(0).permutation(100_000) if shuffled else np.arange(100_000)
    _, roots = clusters(np.column_stack([chain[:-1], chain[1:]]))
    assert not roots.any()


def test_clusters_joined_step_by_step_are_those_of_all_pairs() -> None:
    pairs = np.random.default_rng(1).integers(0, 3000, (2000, 2))
    members, roots = np.empty(0, np.int64), np.empty(0, np.int64)
    for part in np.array_split(pairs, 7):
        members, roots = clusters(np.concatenate([np.column_stack([roots, members]), part]))
    np.testing.assert_array_equal((members, roots), clusters(pairs))


def test_the_hash_is_splitmix64() -> None:
    """The first outputs of the published generator from seed 0, whose state grows by the golden ratio."""
    states = np.arange(3, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert [hex(value) for value in mix(states).tolist()] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]


def test_half_of_the_bits_change_with_one_bit_of_the_input() -> None:
    values = np.random.default_rng(0).integers(0, 2**64, 2000, dtype=np.uint64)
    for bit in (0, 17, 63):
        changed = mix(values) ^ mix(values ^ np.uint64(1 << bit))
        assert abs(np.unpackbits(changed.view(np.uint8)).sum() / len(values) - 32) < 1
