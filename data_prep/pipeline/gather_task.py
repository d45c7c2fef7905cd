"""The gather step of large corpora, between map and reduce: sections of a group become one file divided by shard.

Every section is read once. All copies of a text are in one group, so duplicates are dropped here: the first of equal
texts is kept, excluded documents are dropped, and each drop is counted with its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np

from data_prep.pipeline.exclusion_phase import EXCLUSIONS_NAME, read_exclusions
from data_prep.pipeline.job import Job
from data_prep.pipeline.map_task import sections_url
from data_prep.pipeline.provenance_rows import with_kept_as
from data_prep.pipeline.sections import Section, SectionWriter, join_sections, read_sections, select_documents
from data_prep.pipeline.unit_rows import KeptIds
from data_prep.storage import storage


def gathered_url(work_folder: str, group: int) -> str:
    """Return the URL of the file of a group: a section for each shard of `Destinations.in_group`."""
    return storage.join(work_folder, f"group-{group:06d}.sections")


def gather_group(job: Job, group: int) -> int:
    """Write the group's file, whose existence marks it as done; return the number of its documents."""
    selection, members = selection_of(job, group), job.destinations.in_group(group)
    num_documents, kept = 0, KeptIds()
    with storage.local_write(gathered_url(job.work_folder, group)) as path, open(path, "wb") as file:
        writer = SectionWriter(file, len(members), job.dtype)
        for number, section in unit_sections(job, group):
            selected = selection.select(section)
            if "text" in job.keeps:
                kept.add(number, selected)
            destinations = job.destinations.of_many(selected.document_ids, selected.sources)
            if len(destinations):
                writer.add(selected, np.searchsorted(members, destinations))
            num_documents += len(destinations)
        writer.close({"members": members.tolist(), "dropped": selection.counts()})
        if "text" in job.keeps:
            kept.write(job, group)
    return num_documents


def selection_of(job: Job, group: int) -> Selection:
    """Return the selection for the documents of a group."""
    exclusions = read_exclusions(storage.join(job.work_folder, EXCLUSIONS_NAME), group)
    return Selection(job.deduplication.exact, exclusions)


def unit_sections(job: Job, group: int) -> Iterator[tuple[int, Section]]:
    """Yield the documents of a group in the order of the inputs, with the number of their unit."""
    for number, name in enumerate(job.units):
        for section in read_sections(sections_url(job.work_folder, name), group, job.dtype):
            yield number, section


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
