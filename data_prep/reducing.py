"""The second phase of preparation: one shard is made of its sections of all units, each text once, in seeded order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from data_prep import storage
from data_prep.errors import UserError
from data_prep.manifest import ShardRecord
from data_prep.mapping import sections_url
from data_prep.sections import Section, read_sections
from data_prep.shards import Record, write_shard


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
    vocab_size: int
    token_dtype: Literal["uint16", "uint32"]
    work_folder: str
    output_folder: str
    only: int | None = None
    without: int | None = None


@dataclass(frozen=True)
class ReduceResult:
    """A finished shard and what the manifest wants to know of it.

    Attributes:
        source_counts: (num_sources, 3) documents, sentences and tokens of each source.
        token_counts: (vocab_size,) int64 how often each token id occurs.
    """

    shard: ShardRecord
    duplicates: int
    source_counts: np.ndarray
    token_counts: np.ndarray


@dataclass(frozen=True)
class _Documents:
    """All documents of a shard, flat; a document's place in every array is its number."""

    document_ids: np.ndarray
    document_lengths: np.ndarray
    document_sources: np.ndarray
    sentence_counts: np.ndarray
    sentence_lengths: np.ndarray
    tokens: np.ndarray


def result_url(task: ReduceTask) -> str:
    """Where the mark that the shard is done lies."""
    return storage.join(task.work_folder, f"{task.name}.done.json")


def read_result(task: ReduceTask) -> ReduceResult:
    """The result that a finished unit left."""
    values: dict[str, Any] = json.loads(storage.read_bytes(result_url(task)))
    return ReduceResult(
        shard=ShardRecord.model_validate(values["shard"]),
        duplicates=values["duplicates"],
        source_counts=np.array(values["source_counts"], np.int64).reshape(task.num_sources, 3),
        token_counts=np.array(values["token_counts"], np.int64),
    )


def reduce_shard(task: ReduceTask) -> int:
    """Write the shard and its index, then the mark that it is done. Returns the number of its tokens."""
    documents = _load(task)
    order, duplicates = seeded_order(documents.document_ids, task.seed, task.only, task.without)
    token_counts = np.zeros(task.vocab_size, np.int64)
    records = _counted(_records(documents, order, task.record_tokens), token_counts)
    shard = write_shard(task.output_folder, task.name, records)
    lengths = documents.document_lengths[order].astype(np.int64)
    counts = [np.ones(len(order), np.int64), documents.sentence_counts[order].astype(np.int64), lengths]
    source_counts = np.zeros((task.num_sources, 3), np.int64)
    for column, values in enumerate(counts):
        np.add.at(source_counts[:, column], documents.document_sources[order], values)
    result = {
        "shard": shard.model_dump(mode="json"),
        "duplicates": duplicates,
        "source_counts": source_counts.tolist(),
        "token_counts": token_counts.tolist(),
    }
    storage.write_bytes(result_url(task), json.dumps(result).encode())
    return shard.tokens


def seeded_order(
    document_ids: np.ndarray, seed: int, only: int | None = None, without: int | None = None
) -> tuple[np.ndarray, int]:
    """Numbers of the documents to keep, in the seeded order of the shard, and how many others are copies of them.

    Of equal ids (D,) the first survives: that of the earliest input. The order depends on ids and seed alone.
    """
    unique_ids, firsts, copies = np.unique(document_ids, return_index=True, return_counts=True)
    kept = np.ones(len(unique_ids), bool) if only is None else unique_ids == np.uint64(only)
    if without is not None:
        kept &= unique_ids != np.uint64(without)
    order = np.argsort(_mix(unique_ids[kept] ^ _mix(np.array([seed], np.uint64))), kind="stable")
    return firsts[kept][order], int((copies[kept] - 1).sum())


def _mix(values: np.ndarray) -> np.ndarray:
    """The finishing step of splitmix64 (Steele et al. 2014): a bijection of 64-bit words that looks random."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _load(task: ReduceTask) -> _Documents:
    sections: list[Section] = []
    sources: list[np.ndarray] = []
    dtype = np.uint16 if task.token_dtype == "uint16" else np.uint32
    for number, source in enumerate(task.unit_sources):
        for section in read_sections(sections_url(task.work_folder, number), task.destination, dtype):
            sections.append(section)
            sources.append(np.full(len(section.document_ids), source, np.uint16))
    if not sections:
        raise UserError(
            f"{task.work_folder} lacks the documents of {task.name}; run the same command again with --fresh"
        )
    return _Documents(
        document_ids=np.concatenate([section.document_ids for section in sections]),
        document_lengths=np.concatenate([section.document_lengths for section in sections]),
        document_sources=np.concatenate(sources),
        sentence_counts=np.concatenate([section.sentence_counts for section in sections]),
        sentence_lengths=np.concatenate([section.sentence_lengths for section in sections]),
        tokens=np.concatenate([section.tokens for section in sections]),
    )


def _records(documents: _Documents, order: np.ndarray, record_tokens: int) -> Iterator[Record]:
    """Whole documents in order, as many to a record as fit; a longer one alone."""
    token_stops = np.cumsum(documents.document_lengths, dtype=np.int64)
    sentence_stops = np.cumsum(documents.sentence_counts, dtype=np.int64)
    for members in _blocks(order, documents.document_lengths, record_tokens):
        lengths = documents.document_lengths[members]
        tokens = [
            documents.tokens[stop - length : stop] for stop, length in zip(token_stops[members], lengths, strict=True)
        ]
        sentences = [
            documents.sentence_lengths[stop - count : stop]
            for stop, count in zip(sentence_stops[members], documents.sentence_counts[members], strict=True)
        ]
        yield Record(
            tokens=np.concatenate(tokens),
            documents=_starts(lengths),
            sentences=_starts(np.concatenate(sentences)),
            sources=documents.document_sources[members],
            document_ids=documents.document_ids[members],
        )


def _blocks(order: np.ndarray, lengths: np.ndarray, record_tokens: int) -> Iterator[Sequence[int]]:
    block: list[int] = []
    tokens = 0
    for document in order.tolist():
        length = int(lengths[document])
        if block and tokens + length > record_tokens:
            yield block
            block, tokens = [], 0
        block.append(document)
        tokens += length
    if block:
        yield block


def _starts(lengths: np.ndarray) -> np.ndarray:
    """Start offsets of runs of these lengths, (n,) uint32, the first 0."""
    return (np.cumsum(lengths, dtype=np.int64) - lengths).astype(np.uint32)


def _counted(records: Iterator[Record], token_counts: np.ndarray) -> Iterator[Record]:
    """Pass the records on, adding their tokens to the counts (vocab_size,)."""
    for record in records:
        token_counts += np.bincount(record.tokens, minlength=len(token_counts))
        yield record
