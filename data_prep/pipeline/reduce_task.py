"""The reduce task: makes one shard of its documents, each text once, in seeded order.

For large corpora a gather task comes before it: the sections of a group become one file divided by shard, and every
section is read once. All copies of a text are in one group, so duplicates are dropped here: the first of equal texts is
kept, excluded documents are dropped, and each drop is counted with its reason.
"""

from __future__ import annotations

import io
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from data_prep.base.errors import UserError
from data_prep.dataset.counts import PieceText, RecordCounts
from data_prep.dataset.provenance_sidecar import ProvenanceRow, write_provenance
from data_prep.dataset.shards import Record, starts_of, write_shard
from data_prep.deduplication.similarity_search import mix
from data_prep.documents.drops import DEDUPLICATION, Drop
from data_prep.executors.phases import pack_counts
from data_prep.pipeline.encoding import KeptIds
from data_prep.pipeline.exclusion_phase import EXCLUSIONS_NAME, read_exclusions
from data_prep.pipeline.job import Job
from data_prep.pipeline.map_task import sections_url
from data_prep.pipeline.sections import (
    Section,
    SectionWriter,
    join_sections,
    read_sections,
    select_documents,
    take_runs,
    unpack_provenance,
    with_kept_as,
)
from data_prep.storage import storage
from data_prep.storage.work_files import write_state

HELD_BYTES = 64 << 20
"""Tokens of a shard that are held in memory, in bytes; those of a larger shard lie in a temporary file."""


@dataclass(frozen=True)
class Shard:
    """A shard to make.

    Attributes:
        name: of the shard, such as train-000000.
        only: use only the document of this id (a valid split of one document).
        without: drop the document of this id (it forms the valid split).
        counts_drops: no other task of the destination counts the dropped documents.
    """

    name: str
    destination: int
    only: int | None = None
    without: int | None = None
    counts_drops: bool = True


def result_url(job: Job, shard: Shard) -> str:
    """Return the URL of the file that marks the shard as done."""
    variants = {"only": shard.only, "without": shard.without}
    variant = "".join(f".{name}-{value:016x}" for name, value in variants.items() if value is not None)
    return storage.join(job.work_folder, f"{shard.name}.{shard.destination:06d}{variant}.done.json")


def reduce_shard(job: Job, shard: Shard) -> int:
    """Write the shard, its index and its sidecar, then the file that marks it as done; return its number of tokens."""
    documents, rows, dropped = _read(job, shard)
    names, source = job.reading.names, job.destinations.source(shard.destination)
    counts = RecordCounts(job.vocab_size, job.first_source + len(names), PieceText.of(job.tokenizer()))
    record = write_shard(job.output, shard.name, _counted(_records(job, documents), counts))
    provenance = write_provenance(job.output, shard.name, rows) if rows else None
    name = None if source is None else names[source]
    record = record.model_copy(update={"source": name, "provenance": provenance})
    result = {
        "shard": record.model_dump(mode="json"),
        "destination": shard.destination,
        "dropped": dropped,
        "source_counts": counts.by_source.tolist(),
        "token_counts": pack_counts(counts.by_token),
        "smallest_id": int(documents.document_ids.min()) if len(documents.document_ids) else None,
    }
    write_state(result_url(job, shard), result)
    return record.tokens


def seeded_order(document_ids: np.ndarray, seed: int) -> np.ndarray:
    """Return the order (D,) of documents in a shard; it depends on ids and seed alone and is stable for equal ids."""
    return np.argsort(mix(document_ids ^ mix(np.array([seed], np.uint64))), kind="stable")


def _read(job: Job, shard: Shard) -> tuple[Section, list[ProvenanceRow], list[tuple[int, str, str, int]]]:
    """Return the documents of the shard, the rows of its sidecar, and the documents that this task drops."""
    held, rows = _Held(job.dtype), list[ProvenanceRow]()
    selection = None if job.destinations.num_groups else selection_of(job, shard.destination)
    num_documents, kept = 0, KeptIds()
    for number, section in _sections(job, shard.destination):
        num_documents += len(section.document_ids)
        selected = section if selection is None else selection.select(section)
        if selection is not None and "text" in job.keeps:
            kept.add(number, selected)
        is_mine = np.ones(len(selected.document_ids), bool)
        if shard.only is not None:
            is_mine = selected.document_ids == np.uint64(shard.only)
        elif shard.without is not None:
            is_mine = selected.document_ids != np.uint64(shard.without)
        held.add(select_documents(selected, is_mine & (selected.document_lengths > 0)))
        is_alone = shard.only is not None and shard.counts_drops
        rows += unpack_provenance(selected if is_alone else select_documents(selected, is_mine))
    if not num_documents:
        raise UserError(
            f"{storage.redact(job.work_folder)} lacks the documents of {shard.name}",
            fix="run the same command again with --fresh",
            code="lost-work",
        )
    if selection is not None and "text" in job.keeps:
        kept.write(job, shard.destination)
    dropped = selection.counts() if selection is not None and shard.counts_drops else []
    return held.documents(), rows, dropped


def _sections(job: Job, destination: int) -> Iterator[tuple[int, Section]]:
    """Yield the documents of a destination with the number of their unit, or of their group."""
    if not job.destinations.num_groups:
        yield from unit_sections(job, destination)
        return
    for group in job.destinations.groups_for(destination):
        number = int(np.searchsorted(job.destinations.in_group(group), destination))
        for section in read_sections(gathered_url(job.work_folder, group), number, job.dtype):
            yield group, section


class _Held:
    """Collected documents of a shard; about 22 bytes of memory each, plus the lengths of their sentences."""

    def __init__(self, token_dtype: type[np.unsignedinteger]) -> None:
        self._arrays: dict[str, list[np.ndarray]] = {
            "document_ids": [np.empty(0, np.uint64)],
            "document_lengths": [np.empty(0, np.uint32)],
            "sentence_counts": [np.empty(0, np.uint32)],
            "sentence_lengths": [np.empty(0, np.uint32)],
            "sources": [np.empty(0, np.uint16)],
        }
        self._dtype = token_dtype
        self._tokens: BinaryIO = io.BytesIO()

    def add(self, section: Section) -> None:
        for name, arrays in self._arrays.items():
            arrays.append(np.array(getattr(section, name)))  # a copy, which frees the rest of what was read
        self._tokens.write(np.ascontiguousarray(section.tokens).data)
        if isinstance(self._tokens, io.BytesIO) and self._tokens.tell() > HELD_BYTES:
            file: Any = tempfile.TemporaryFile(prefix="clozeworks-")
            file.write(self._tokens.getbuffer())
            self._tokens = file

    def documents(self) -> Section:
        """Return all documents in the order in which they were added."""
        if isinstance(self._tokens, io.BytesIO):
            tokens = np.frombuffer(self._tokens.getbuffer(), self._dtype)
        else:
            self._tokens.flush()
            tokens = np.memmap(self._tokens, self._dtype, "r")
        return Section(**{name: np.concatenate(arrays) for name, arrays in self._arrays.items()}, tokens=tokens)


def _counted(records: Iterable[Record], counts: RecordCounts) -> Iterator[Record]:
    """Yield the records and count them."""
    for record in records:
        counts.add(record)
        yield record


def _records(job: Job, documents: Section) -> Iterator[Record]:
    """Yield records of whole documents in seeded order; a document that is too long gets its own record."""
    order = seeded_order(documents.document_ids, job.shards.seed)
    token_starts, sentence_starts = starts_of(documents.document_lengths), starts_of(documents.sentence_counts)
    for first, last in _blocks(documents.document_lengths[order], job.shards.record_tokens):
        members = order[first:last]
        lengths, counts = documents.document_lengths[members], documents.sentence_counts[members]
        sentence_lengths = take_runs(documents.sentence_lengths, sentence_starts[members], counts)
        yield Record(
            tokens=take_runs(documents.tokens, token_starts[members], lengths),
            documents=starts_of(lengths).astype(np.uint32),
            sentences=starts_of(sentence_lengths).astype(np.uint32),
            sources=documents.sources[members] + np.uint16(job.first_source),
            document_ids=documents.document_ids[members],
        )


def _blocks(lengths: np.ndarray, most: int) -> Iterator[tuple[int, int]]:
    """Yield (first, stop) of runs of documents of at most `most` tokens together; a longer document is a run."""
    stops = np.cumsum(lengths, dtype=np.int64)
    first = 0
    while first < len(stops):
        tokens_before = stops[first] - lengths[first]
        last = max(first + 1, int(np.searchsorted(stops, tokens_before + most, "right")))
        yield first, last
        first = last


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

    def __init__(self, is_exact: bool, exclusions: Mapping[Drop, np.ndarray]) -> None:
        """Take exclusions, (n, 2) uint64 sorted: the id, and the id that represents it or 0."""
        self._seen = SeenIds() if is_exact else None
        self._exclusions = exclusions
        self._dropped: Counter[tuple[int, Drop]] = Counter()

    def select(self, section: Section) -> Section:
        """Return the kept documents, followed by dropped ones whose provenance is kept, without tokens."""
        ids = section.document_ids
        kept_as = ids.copy()
        is_kept, is_excluded = np.ones(len(ids), bool), np.zeros(len(ids), bool)
        if self._seen is not None:
            is_kept = self._seen.add(ids)
            self._drop(Drop(DEDUPLICATION, "duplicate"), section.sources[~is_kept])
        for drop, excluded in self._exclusions.items():
            if not len(excluded):
                continue
            rows = np.minimum(np.searchsorted(excluded[:, 0], ids), len(excluded) - 1)
            is_named = excluded[rows, 0] == ids
            # A copy of an excluded document, itself dropped as a copy, is represented by the same document.
            is_new = is_named & ~is_excluded
            kept_as[is_new] = excluded[rows[is_new], 1]
            is_excluded |= is_named
            self._drop(drop, section.sources[is_kept & is_named])
            is_kept &= ~is_named
        kept = select_documents(section, is_kept)
        has_row = ~is_kept & (section.provenance_lengths > 0) & (kept_as > 0)
        if not has_row.any():
            return kept
        return join_sections([kept, with_kept_as(select_documents(section, has_row), kept_as[has_row])])

    def counts(self) -> list[tuple[int, str, str, int]]:
        """Return source in the plan, step, reason, and number of dropped documents."""
        return [(source, *drop, count) for (source, drop), count in sorted(self._dropped.items())]

    def _drop(self, drop: Drop, sources: np.ndarray) -> None:
        counts = np.bincount(sources)
        for source in np.flatnonzero(counts).tolist():
            self._dropped[source, drop] += int(counts[source])
