"""Which documents stay: first of equal ids over many sections, exclusions, and the provenance of what is dropped."""

from __future__ import annotations

import numpy as np
import pytest

from data_prep import Document
from data_prep.documents.drops import Drop
from data_prep.pipeline.exclusion_phase import NEAR
from data_prep.pipeline.reduce_task import SeenIds, Selection
from data_prep.pipeline.sections import pack_provenance, unpack_provenance
from tests.support.work_units import Section

TAKEN_DOWN = Drop("takedowns", "removed earlier")


@pytest.mark.parametrize("seed", range(5))
def test_the_set_of_seen_ids_equals_a_python_set(seed: int) -> None:
    generator = np.random.default_rng(seed)
    seen: set[int] = set()
    ids = SeenIds()
    for _ in range(200):
        batch = generator.integers(0, 3000, generator.integers(0, 40)).astype(np.uint64)
        expected = []
        for each in batch.tolist():
            expected.append(each not in seen)
            seen.add(each)
        assert ids.add(batch).tolist() == expected
    assert sorted(len(run) for run in ids._runs) == sorted({len(run) for run in ids._runs})
    assert len(ids._runs) <= 12


def section(ids: list[int], sources: list[int], with_provenance: bool = False) -> Section:
    """Each document is one sentence of one token, its id."""
    documents = [Document("", id=f"d{number}", source="web") for number in range(len(ids))]
    return Section(
        np.array(ids, np.uint64),
        np.ones(len(ids), np.uint32),
        np.ones(len(ids), np.uint32),
        np.ones(len(ids), np.uint32),
        np.array(ids, np.uint16),
        np.array(sources, np.uint16),
        **(pack_provenance(documents) if with_provenance else {}),
    )


def test_drops_are_counted_by_source_step_and_reason() -> None:
    exclusions = {TAKEN_DOWN: np.array([[4, 0]], np.uint64), NEAR: np.array([[5, 1]], np.uint64)}
    selection = Selection(True, exclusions)
    first = selection.select(section([1, 4, 5, 1], [0, 0, 1, 1]))
    second = selection.select(section([2, 5, 1], [2, 2, 2]))
    assert first.document_ids.tolist() == first.tokens.tolist() == [1] and second.document_ids.tolist() == [2]
    assert selection.counts() == [
        (0, "takedowns", "removed earlier", 1),
        (1, "deduplication", "duplicate", 1),
        (1, "near duplicates", "near duplicate", 1),
        (2, "deduplication", "duplicate", 2),
    ]


def test_without_exact_deduplication_copies_stay() -> None:
    selection = Selection(False, {})
    assert selection.select(section([1, 1], [0, 0])).document_ids.tolist() == [1, 1] and selection.counts() == []


def test_dropped_documents_leave_their_provenance_and_the_kept_copy() -> None:
    exclusions = {TAKEN_DOWN: np.array([[4, 0]], np.uint64), NEAR: np.array([[5, 1]], np.uint64)}
    selection = Selection(True, exclusions)
    found = selection.select(section([1, 4, 5, 1, 5], [0] * 5, with_provenance=True))
    assert found.document_lengths.tolist() == [1, 0, 0, 0] and found.tokens.tolist() == [1]
    rows = [(row.document_id, row.id, row.kept_as) for row in unpack_provenance(found)]
    assert rows == [(1, "d0", 1), (5, "d2", 1), (1, "d3", 1), (5, "d4", 1)]
