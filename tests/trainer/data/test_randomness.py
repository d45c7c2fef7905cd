from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.randomness import Purpose, below, fold, high_bits, low_bits, permute, root_key, uniform


def test_hashes_are_those_of_splitmix64() -> None:
    # The first outputs of the reference implementation for seed 0.
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert fold(np.uint64(0), np.arange(3)).tolist() == expected


def test_a_hash_does_not_depend_on_what_it_is_computed_with() -> None:
    keys = fold(root_key(3), np.arange(5))
    together = fold(keys[:, None], np.arange(7))
    assert all(int(fold(keys[row], column)) == together[row, column] for row in range(5) for column in range(7))


def test_keys_of_other_seeds_purposes_and_epochs_differ() -> None:
    keys = {
        int(root_key(seed, purpose, epoch)) for seed in (0, 1, 2**64 - 1) for purpose in Purpose for epoch in range(9)
    }
    assert len(keys) == 3 * len(Purpose) * 9


def test_draws_are_uniform() -> None:
    hashes = fold(root_key(1), np.arange(100_000))
    for draws in (uniform(hashes), high_bits(hashes) / 2**32, low_bits(hashes) / 2**32):
        counts = np.histogram(draws, bins=10, range=(0, 1))[0]
        assert counts.sum() == 100_000
        assert abs(counts - 10_000).max() < 5 * np.sqrt(10_000)
    numbers = below(low_bits(hashes), 7)
    assert set(numbers.tolist()) == set(range(7))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_permute_is_a_bijection(size: int, key: int) -> None:
    moved = permute(np.arange(size), np.full(size, size), np.full(size, key, np.uint64))
    assert np.array_equal(np.sort(moved), np.arange(size))


def test_permute_leaves_no_trace_of_the_order() -> None:
    size = 5000
    moved = permute(np.arange(size), np.full(size, size), np.full(size, root_key(5)))
    assert abs(np.corrcoef(np.arange(size), moved)[0, 1]) < 5 / np.sqrt(size)
    assert (np.diff(moved) == 1).mean() < 0.01
    other = permute(np.arange(size), np.full(size, size), np.full(size, root_key(6)))
    assert (moved == other).mean() < 0.01
