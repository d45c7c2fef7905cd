"""Destinations and groups: who goes where agrees with who looks where, for every kind of plan."""

from __future__ import annotations

import numpy as np
import pytest

from data_prep.pipeline.destinations import Destinations

EDGES = [0, 1, 2**32 - 1, 2**32, 2**31, 2**31 - 1, 2**64 - 1, 2**63, 0x5555_5555, 0x5555_5556, 0xAAAA_AAAA]
KINDS = [
    Destinations(5, 2, 0.3),
    Destinations(50, 3, 0.1, num_groups=8),
    Destinations(7, 1, 0.1, num_groups=7),
    Destinations(12, 4, 0.3, source_shards=((9, 2), (1, 1), (2, 1)), num_groups=8),
    Destinations(3, 3, 0.5, source_shards=((1, 1), (1, 1), (1, 1)), num_groups=1),
]


@pytest.mark.parametrize("places", KINDS)
def test_a_shard_looks_in_all_groups_that_hold_its_documents(places: Destinations) -> None:
    ids = np.concatenate([np.array(EDGES, np.uint64), np.random.default_rng(1).integers(0, 1 << 64, 5000, np.uint64)])
    for source in range(max(1, len(places.source_shards))):
        destinations = places.of_many(ids, np.full(len(ids), source))
        groups = places.groups_of(ids)
        assert groups.min() >= 0 and groups.max() < places.num_sections
        for destination, group in set(zip(destinations.tolist(), groups.tolist(), strict=True)):
            assert group in places.groups_for(destination)
            assert destination in places.in_group(group).tolist()
            assert places.source(destination) == (source if places.source_shards else None)
        splits = [places.split(destination) for destination in destinations.tolist()]
        assert [split == "valid" for split in splits] == (ids >> np.uint64(32) < places.valid_fraction * 2**32).tolist()
    members = [places.in_group(group) for group in range(places.num_sections)]
    assert all((np.diff(part) > 0).all() for part in members)
    pairs = {(destination, group) for group, part in enumerate(members) for destination in part.tolist()}
    assert pairs == {(d, group) for d in range(len(places)) for group in places.groups_for(d)}


def test_all_sources_have_a_text_in_the_same_group_and_in_shards_of_their_own() -> None:
    places = KINDS[3]
    ids = np.random.default_rng(2).integers(0, 1 << 64, 1000, np.uint64)
    found = [set(places.of_many(ids, np.full(1000, source)).tolist()) for source in range(3)]
    assert found[0] == {*range(9), 12, 13} and found[1] == {9, 14} and found[2] == {10, 11, 15}


def test_shards_of_a_source_are_of_equal_size() -> None:
    places = Destinations(9, 1, 0.0001, source_shards=((9, 1),), num_groups=5)
    ids = np.random.default_rng(3).integers(0, 1 << 64, 90_000, np.uint64)
    counts = np.bincount(places.of_many(ids, np.zeros(len(ids), int)), minlength=10)
    assert counts[:9].min() > 9_500 and counts[:9].max() < 10_500


def test_train_or_valid_depends_on_the_high_half_and_the_shard_on_the_low() -> None:
    places = Destinations(num_train=3, num_valid=2, valid_fraction=0.5)
    assert places.of((1 << 63) + 4) == 1 and places.split(places.of((1 << 63) + 4)) == "train"
    assert places.of((1 << 63) - (1 << 32) + 3) == 4 and places.split(4) == "valid"


def test_many_destinations_are_those_of_each() -> None:
    places = Destinations(num_train=5, num_valid=3, valid_fraction=0.4)
    ids = np.random.default_rng(0).integers(0, 1 << 64, 300, np.uint64)
    expected = [
        5 + (number & 0xFFFFFFFF) % 3 if number >> 32 < 0.4 * 2**32 else (number & 0xFFFFFFFF) % 5
        for number in ids.tolist()
    ]
    assert places.of_many(ids).tolist() == expected == [places.of(number) for number in ids.tolist()]
    assert len(set(expected)) == 8
    assert [places.of_many(ids[:0]).tolist(), places.of(2**64 - 1)] == [[], (2**32 - 1) % 5]
