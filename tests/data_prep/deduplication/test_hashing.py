from __future__ import annotations

import numpy as np

from data_prep.deduplication.hashing import mix


def test_it_is_splitmix64() -> None:
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
