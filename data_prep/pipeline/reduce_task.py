"""The second phase of preparation: one shard is made of its sections of all units, each text once, in seeded order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from data_prep.base.errors import UserError
from data_prep.dataset.counts import PieceText, RecordCounts
from data_prep.dataset.manifest_records import ShardRecord
from data_prep.dataset.shard_index import starts_of
from data_prep.dataset.shards import Record, write_shard
from data_prep.dataset.state_files import read_state, write_state
from data_prep.deduplication.exclusions import NAME as EXCLUSIONS_NAME
from data_prep.deduplication.exclusions import read_exclusions
from data_prep.deduplication.hashing import mix
from data_prep.pipeline.map_task import cached_tokenizer, sections_url
from data_prep.pipeline.sections import Section, read_sections, read_sizes, select_documents, take_runs
from data_prep.storage import storage

HELD_TOKENS = 1 << 24
"""Tokens of a shard that are held at once; of a larger one the sections are read more than once."""


@dataclass(frozen=True)
class ReduceTask:
    """A unit of the second phase, with all it needs to be done anywhere.

    Attributes:
        name: of the shard, such as train-000000.
        destination: whose sections are read.
        unit_sources: number of the source of each unit of the first phase.
        only: take the document of this id alone (a valid split made of one document).
        without: leave out the document of this id (it makes the valid split).
    """

    name: str
    destination: int
    unit_sources: tuple[int, ...]
    num_sources: int
    record_tokens: int
    seed: int
    exact_deduplication: bool
    vocab_size: int
    token_dtype: Literal["uint16", "uint32"]
    tokenizer_folder: str
    tokenizer_fingerprint: str
    work_folder: str
    output_folder: str
    only: int | None = None
    without: int | None = None


@dataclass(frozen=True)
class ReduceResult:
    """A finished shard and what the manifest wants to know of it.

    Attributes:
        dropped: of each source, documents left out by reason.
        source_counts: (num_sources, 5) documents, sentences, tokens, words and bytes of text of each source.
        token_counts: (vocab_size,) int64 how often each token id occurs.
    """

    shard: ShardRecord
    dropped: tuple[dict[str, int], ...]
    source_counts: np.ndarray
    token_counts: np.ndarray


@dataclass(frozen=True)
class _Documents:
    """What is known of all documents that a shard's sections hold, copies included, in the order of the inputs.

    Attributes:
        unit_stops: (num_units,) int64 how many documents the units up to each have.
        ids: (D,) uint64.
        lengths: (D,) uint32 tokens of each.
        sentence_counts: (D,) uint32.
        sources: (D,) uint16 number of the source of each.
    """

    unit_stops: np.ndarray
    ids: np.ndarray
    lengths: np.ndarray
    sentence_counts: np.ndarray
    sources: np.ndarray


def result_url(task: ReduceTask) -> str:
    """Where the mark that the shard is done lies."""
    return storage.join(task.work_folder, f"{task.name}.done.json")


def read_result(task: ReduceTask) -> ReduceResult:
    """The result that a finished unit left."""
    values = read_state(result_url(task))
    return ReduceResult(
        shard=ShardRecord.model_validate(values["shard"]),
        dropped=tuple(values["dropped"]),
        source_counts=np.array(values["source_counts"], np.int64).reshape(task.num_sources, 5),
        token_counts=np.array(values["token_counts"], np.int64),
    )


def reduce_shard(task: ReduceTask) -> int:
    """Write the shard and its index, then the mark that it is done. Returns the number of its tokens."""
    documents = _documents(task)
    kept, dropped = _kept(task, documents.ids, documents.sources)
    order = kept[seeded_order(documents.ids[kept], task.seed)]
    tokenizer = cached_tokenizer(task.tokenizer_folder, task.tokenizer_fingerprint)
    counts = RecordCounts(task.vocab_size, task.num_sources, PieceText.of(tokenizer))
    records = _counted(_records(task, documents, order), counts)
    shard = write_shard(task.output_folder, task.name, records)
    result = {
        "shard": shard.model_dump(mode="json"),
        "dropped": dropped,
        "source_counts": counts.by_source.tolist(),
        "token_counts": counts.by_token.tolist(),
    }
    write_state(result_url(task), result)
    return shard.tokens


def seeded_order(document_ids: np.ndarray, seed: int) -> np.ndarray:
    """The order (D,) of documents in a shard; it depends on ids and seed alone, equal ids stay as they were."""
    return np.argsort(mix(document_ids ^ mix(np.array([seed], np.uint64))), kind="stable")


def _kept(task: ReduceTask, ids: np.ndarray, sources: np.ndarray) -> tuple[np.ndarray, list[dict[str, int]]]:
    """Numbers of the documents to keep, ascending, and what each source loses, by reason.

    Of equal ids the first survives: that of the earliest input.
    """
    dropped: list[dict[str, int]] = [{} for _ in range(task.num_sources)]

    def drop(reason: str, gone: np.ndarray) -> None:
        counts = np.bincount(sources[gone], minlength=task.num_sources)
        for source in np.flatnonzero(counts).tolist():
            dropped[source][reason] = int(counts[source])

    if task.only is not None:
        mine = ids == np.uint64(task.only)
    else:
        mine = np.ones(len(ids), bool) if task.without is None else ids != np.uint64(task.without)
    kept = np.flatnonzero(mine)
    if task.exact_deduplication:
        firsts = kept[np.unique(ids[kept], return_index=True)[1]]
        drop("duplicate", np.setdiff1d(kept, firsts, assume_unique=True))
        kept = np.sort(firsts)
    exclusions = read_exclusions(storage.join(task.work_folder, EXCLUSIONS_NAME), task.destination)
    for reason, excluded in exclusions.items():
        gone = np.isin(ids[kept], excluded)
        drop(reason, kept[gone])
        kept = kept[~gone]
    return kept, dropped


def _counted(records: Iterable[Record], counts: RecordCounts) -> Iterator[Record]:
    """Pass the records on, counted."""
    for record in records:
        counts.add(record)
        yield record


def _documents(task: ReduceTask) -> _Documents:
    urls = _sections_urls(task)
    sizes = [read_sizes(url, task.destination) for url in urls]
    ids, lengths, counts = (np.concatenate(arrays) for arrays in zip(*sizes, strict=True))
    if not len(ids):
        raise UserError(
            f"{storage.redact(task.work_folder)} lacks the documents of {task.name}; "
            "run the same command again with --fresh"
        )
    unit_stops = np.cumsum([len(unit_ids) for unit_ids, _, _ in sizes])
    sources = np.repeat(np.array(task.unit_sources, np.uint16), np.diff(unit_stops, prepend=0))
    return _Documents(unit_stops, ids, lengths, counts, sources)


def _sections_urls(task: ReduceTask) -> list[str]:
    return [sections_url(task.work_folder, number) for number in range(len(task.unit_sources))]


def _records(task: ReduceTask, documents: _Documents, order: np.ndarray) -> Iterator[Record]:
    """Whole documents in order, as many to a record as fit; a longer one alone.

    The documents of so many records as fit in HELD_TOKENS are read at once.
    """
    ordered_lengths = documents.lengths[order]
    blocks = list(_blocks(ordered_lengths, task.record_tokens))
    firsts = np.array([first for first, _ in blocks], np.int64)
    block_lengths = np.add.reduceat(ordered_lengths, firsts, dtype=np.int64)
    for first_block, last_block in _blocks(block_lengths, HELD_TOKENS):
        held = np.sort(order[blocks[first_block][0] : blocks[last_block - 1][1]])
        section = _read(task, documents, held)
        token_starts, sentence_starts = starts_of(section.document_lengths), starts_of(section.sentence_counts)
        for first, last in blocks[first_block:last_block]:
            members = np.searchsorted(held, order[first:last])
            lengths, counts = section.document_lengths[members], section.sentence_counts[members]
            sentence_lengths = take_runs(section.sentence_lengths, sentence_starts[members], counts)
            yield Record(
                tokens=take_runs(section.tokens, token_starts[members], lengths),
                documents=starts_of(lengths).astype(np.uint32),
                sentences=starts_of(sentence_lengths).astype(np.uint32),
                sources=documents.sources[order[first:last]],
                document_ids=section.document_ids[members],
            )


def _read(task: ReduceTask, documents: _Documents, numbers: np.ndarray) -> Section:
    """The documents of these numbers, which ascend, straight to their places, so that nothing is held twice."""
    dtype = np.uint16 if task.token_dtype == "uint16" else np.uint32
    lengths, counts = documents.lengths[numbers], documents.sentence_counts[numbers]
    held = Section(
        document_ids=documents.ids[numbers],
        document_lengths=lengths,
        sentence_counts=counts,
        sentence_lengths=np.empty(counts.sum(dtype=np.int64), np.uint32),
        tokens=np.empty(lengths.sum(dtype=np.int64), dtype),
    )
    is_held = np.zeros(len(documents.ids), bool)
    is_held[numbers] = True
    sentence = token = 0
    for url, of_unit in zip(_sections_urls(task), np.split(is_held, documents.unit_stops[:-1]), strict=True):
        place = 0
        for section in read_sections(url, task.destination, dtype) if of_unit.any() else ():
            part = select_documents(section, of_unit[place : place + len(section.document_ids)])
            held.sentence_lengths[sentence : sentence + len(part.sentence_lengths)] = part.sentence_lengths
            held.tokens[token : token + len(part.tokens)] = part.tokens
            place += len(section.document_ids)
            sentence += len(part.sentence_lengths)
            token += len(part.tokens)
    return held


def _blocks(lengths: np.ndarray, most: int) -> Iterator[tuple[int, int]]:
    """The first and last + 1 of runs of things that are together no longer than `most`; a longer thing alone."""
    stops = np.cumsum(lengths, dtype=np.int64)
    first = 0
    while first < len(stops):
        tokens_before = stops[first] - lengths[first]
        last = max(first + 1, int(np.searchsorted(stops, tokens_before + most, "right")))
        yield first, last
        first = last
