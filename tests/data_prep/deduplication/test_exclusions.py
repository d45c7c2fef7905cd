"""Exclusions: each destination reads back the ids that go to it, by step and reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data_prep.base.errors import UserError
from data_prep.documents.drops import Drop
from data_prep.pipeline.exclusion_phase import NEAR, read_exclusions, write_exclusions
from tests.support.work_units import Destinations

PAIRS = np.column_stack([np.arange(9), np.full(9, 7)])


def test_ids_are_read_back_for_each_destination(tmp_path: Path) -> None:
    places = Destinations(num_train=3, num_valid=2, valid_fraction=0.3)
    ids = np.random.default_rng(0).integers(0, 1 << 64, 200, np.uint64)
    near, earlier = np.concatenate([ids[:150], ids[:5]]), ids[100:]
    by_drop = {
        NEAR: np.column_stack([near, ids[[0]].repeat(155)]),
        Drop("takedowns", "removed earlier"): np.column_stack([earlier, np.zeros_like(earlier)]),
    }
    url = str(tmp_path / "exclusions")
    write_exclusions(url, by_drop, places.num_sections, places.groups_of)
    for drop, expected in by_drop.items():
        found = [read_exclusions(url, number)[drop] for number in range(len(places))]
        assert all(len(part) for part in found)
        assert sorted(np.concatenate(found).tolist()) == [
            list(row) for row in sorted(set(map(tuple, expected.tolist())))
        ]
        for number, part in enumerate(found):
            assert part.tolist() == sorted(part.tolist())
            assert {places.of(document_id) for document_id in part[:, 0].tolist()} == {number}


def test_no_file_excludes_nothing(tmp_path: Path) -> None:
    assert read_exclusions(str(tmp_path / "none"), 0) == {}


def test_no_flipped_byte_excludes_other_documents(tmp_path: Path) -> None:
    path = tmp_path / "exclusions"
    write_exclusions(str(path), {NEAR: PAIRS}, 2, lambda ids: (ids % 2).astype(np.int64))
    written = path.read_bytes()
    expected = [[0, 2, 4, 6, 8], [1, 3, 5, 7]]
    for offset in range(len(written)):
        path.write_bytes(written[:offset] + bytes([written[offset] ^ 4]) + written[offset + 1 :])
        assert refused(path, expected)
        path.write_bytes(written[:offset])
        assert refused(path, expected)


def refused(path: Path, expected: list[list[int]]) -> list[int]:
    """The destinations whose ids are reported as damaged; those of the others are as they were written."""
    damaged = []
    for destination, ids in enumerate(expected):
        try:
            assert read_exclusions(str(path), destination)[NEAR].tolist() == [[number, 7] for number in ids]
        except UserError as error:
            assert "exclusions is damaged" in str(error) and "--fresh" in str(error)
            damaged.append(destination)
    return damaged


def test_a_shard_reads_only_the_ids_of_its_destination(tmp_path: Path) -> None:
    path = tmp_path / "exclusions"
    write_exclusions(str(path), {NEAR: PAIRS}, 2, lambda ids: (ids % 2).astype(np.int64))
    written = path.read_bytes()
    path.write_bytes(written[:80] + bytes([written[80] ^ 4]) + written[81:])  # after the five pairs of the first
    assert refused(path, [[0, 2, 4, 6, 8], [1, 3, 5, 7]]) == [1]
