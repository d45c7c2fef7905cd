"""Selection of documents: keeps the first of equal texts and drops excluded ones, with the reason of each drop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from data_prep.pipeline.provenance_rows import with_kept_as
from data_prep.pipeline.sections import Section, join_sections, select_documents


class SeenIds:
    """A set of ids; 8 bytes each, temporarily 16. Ids are in sorted runs, each more than twice as long as the next, so
    an id is moved and looked up a logarithmic number of times.
    """

    def __init__(self) -> None:
        self._runs: list[np.ndarray] = []

    def add(self, ids: np.ndarray) -> np.ndarray:
        """Add ids (n,) uint64; return which are new, (n,) bool: the first of equal ones."""
        unique, firsts = np.unique(ids, return_index=True)
        is_new = np.ones(len(unique), bool)
        for run in self._runs:
            is_new &= run[np.minimum(np.searchsorted(run, unique), len(run) - 1)] != unique
        if is_new.any():
            self._runs.append(unique[is_new])
        while len(self._runs) > 1 and len(self._runs[-2]) <= 2 * len(self._runs[-1]):
            last = self._runs.pop()
            self._runs[-1] = np.sort(np.concatenate([self._runs[-1], last]), kind="stable")
        is_first = np.zeros(len(ids), bool)
        is_first[firsts[is_new]] = True
        return is_first


class Selection:
    """Selects documents in the order of the inputs; all copies of a text go through the same object."""

    def __init__(self, is_exact: bool, exclusions: Mapping[str, np.ndarray]) -> None:
        """Take exclusions by reason, (n, 2) uint64 sorted: the id, and the id that represents it or 0."""
        self._seen = SeenIds() if is_exact else None
        self._exclusions = exclusions
        self._dropped: Counter[tuple[int, str]] = Counter()

    def select(self, section: Section) -> Section:
        """Return the kept documents, followed by dropped ones whose provenance is kept, without tokens."""
        ids = section.document_ids
        kept_as = ids.copy()
        is_kept, is_excluded = np.ones(len(ids), bool), np.zeros(len(ids), bool)
        if self._seen is not None:
            is_kept = self._seen.add(ids)
            self._drop("duplicate", section.sources[~is_kept])
        for reason, excluded in self._exclusions.items():
            if not len(excluded):
                continue
            rows = np.minimum(np.searchsorted(excluded[:, 0], ids), len(excluded) - 1)
            is_named = excluded[rows, 0] == ids
            # A copy of an excluded document, itself dropped as a copy, is represented by the same document.
            is_new = is_named & ~is_excluded
            kept_as[is_new] = excluded[rows[is_new], 1]
            is_excluded |= is_named
            self._drop(reason, section.sources[is_kept & is_named])
            is_kept &= ~is_named
        kept = select_documents(section, is_kept)
        has_row = ~is_kept & (section.provenance_lengths > 0) & (kept_as > 0)
        if not has_row.any():
            return kept
        return join_sections([kept, with_kept_as(select_documents(section, has_row), kept_as[has_row])])

    def counts(self) -> list[tuple[int, str, int]]:
        """Return source in the plan, reason, and number of dropped documents."""
        return [(source, reason, count) for (source, reason), count in sorted(self._dropped.items())]

    def _drop(self, reason: str, sources: np.ndarray) -> None:
        counts = np.bincount(sources)
        for source in np.flatnonzero(counts).tolist():
            self._dropped[source, reason] += int(counts[source])
