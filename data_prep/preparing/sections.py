"""The work file of one unit: its encoded documents, sectioned by the shard that they will go to.

A file is written front to back in bounded memory: now and then the buffered documents are written as one
section for each destination, and the table of all sections stands at the end. So a shard reads its own
sections by offset.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from data_prep.data_set.shard_index import starts_of
from data_prep.errors import UserError
from data_prep.files import storage

FLUSH_BYTES = 64 << 20
"""Held before it is written, in bytes."""

_VALUES_AT_ONCE = 1 << 20
_MAGIC = b"clozesec"
_TRAILER = struct.Struct("<8sQQQQ")  # magic, flushes, destinations, offset of the table, bytes of the summary
_SECTION = struct.Struct("<QQQ")  # documents, sentences, tokens


@dataclass(frozen=True)
class Section:
    """Documents in the order in which they were read.

    Attributes:
        document_ids: (D,) uint64.
        document_lengths: (D,) uint32 tokens of each.
        sentence_counts: (D,) uint32 sentences of each.
        sentence_lengths: (S,) uint32 tokens of each sentence.
        tokens: (T,) uint16 or uint32.
    """

    document_ids: np.ndarray
    document_lengths: np.ndarray
    sentence_counts: np.ndarray
    sentence_lengths: np.ndarray
    tokens: np.ndarray

    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.document_ids, self.document_lengths, self.sentence_counts, self.sentence_lengths, self.tokens

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())


class SectionWriter:
    """Writes a work file; `close` ends it with its table and a summary."""

    def __init__(self, file: BinaryIO, num_destinations: int, token_dtype: type[np.unsignedinteger]) -> None:
        self._file = file
        self._dtype = token_dtype
        self._num_destinations = num_destinations
        self._waiting: list[tuple[Section, np.ndarray]] = []
        self._waiting_bytes = 0
        self._offsets: list[np.ndarray] = []
        self._document_counts = np.zeros(num_destinations, np.int64)

    def add(self, section: Section, destinations: np.ndarray) -> None:
        """Add documents, each with the number of its destination, (D,) int64."""
        self._document_counts += np.bincount(destinations, minlength=self._num_destinations)
        self._waiting.append((section, destinations))
        self._waiting_bytes += section.nbytes + destinations.nbytes
        if self._waiting_bytes >= FLUSH_BYTES:
            self._flush()

    def close(self, summary: dict[str, Any]) -> None:
        if self._waiting:
            self._flush()
        table_offset = self._file.tell()
        for offsets in self._offsets:
            self._file.write(offsets.tobytes())
        self._file.write(self._document_counts.tobytes())
        data = json.dumps(summary).encode()
        self._file.write(data)
        self._file.write(_TRAILER.pack(_MAGIC, len(self._offsets), self._num_destinations, table_offset, len(data)))

    def _flush(self) -> None:
        """Write the waiting documents in order of their destinations, else in the order in which they came."""
        documents = join_sections([section for section, _ in self._waiting])
        destinations = np.concatenate([destinations for _, destinations in self._waiting])
        self._waiting, self._waiting_bytes = [], 0
        order = np.argsort(destinations, kind="stable")
        bounds = np.searchsorted(destinations[order], np.arange(self._num_destinations + 1))
        token_starts = starts_of(documents.document_lengths)
        sentence_starts = starts_of(documents.sentence_counts)
        offsets = np.zeros(self._num_destinations + 1, np.uint64)
        for destination, (first, last) in enumerate(itertools.pairwise(bounds.tolist())):
            offsets[destination] = self._file.tell()
            mine = order[first:last]
            if len(mine):
                lengths, counts = documents.document_lengths[mine], documents.sentence_counts[mine]
                sizes = len(mine), counts.sum(dtype=np.int64), lengths.sum(dtype=np.int64)
                self._file.write(_SECTION.pack(*map(int, sizes)))
                for array in (documents.document_ids[mine], lengths, counts):
                    self._file.write(array.tobytes())
                self._write_runs(documents.sentence_lengths, sentence_starts[mine], counts)
                self._write_runs(documents.tokens.astype(self._dtype, copy=False), token_starts[mine], lengths)
        offsets[-1] = self._file.tell()
        self._offsets.append(offsets)

    def _write_runs(self, values: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
        """Write runs of values one after the other, a bounded number at once."""
        stops = np.cumsum(lengths, dtype=np.int64)
        cuts = np.searchsorted(stops, np.arange(_VALUES_AT_ONCE, int(stops[-1]), _VALUES_AT_ONCE))
        for first, last in itertools.pairwise([0, *cuts.tolist(), len(lengths)]):
            self._file.write(take_runs(values, starts[first:last], lengths[first:last]).tobytes())


def take_runs(values: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Runs of values, given by starts and lengths (n,), one after the other."""
    if len(starts) == 1:
        return values[starts[0] : starts[0] + lengths[0]]
    places = np.repeat(starts - starts_of(lengths), lengths) + np.arange(lengths.sum(dtype=np.int64))
    taken: np.ndarray = values[places]
    return taken


def select_documents(section: Section, is_kept: np.ndarray) -> Section:
    """The documents of a mask (D,) alone."""
    if is_kept.all():
        return section
    lengths, counts = section.document_lengths[is_kept], section.sentence_counts[is_kept]
    return Section(
        document_ids=section.document_ids[is_kept],
        document_lengths=lengths,
        sentence_counts=counts,
        sentence_lengths=take_runs(section.sentence_lengths, starts_of(section.sentence_counts)[is_kept], counts),
        tokens=take_runs(section.tokens, starts_of(section.document_lengths)[is_kept], lengths),
    )


def join_sections(sections: Sequence[Section]) -> Section:
    """The documents of all sections in order; there is one at least."""
    return Section(*(np.concatenate(arrays) for arrays in zip(*map(Section.arrays, sections), strict=True)))


def read_summary(url: str) -> tuple[dict[str, Any], np.ndarray]:
    """The summary of a work file, and its number of documents for each destination."""
    with storage.open_read(url) as file:
        flushes, destinations, table_offset, summary_bytes = _read_trailer(file, url)
        file.seek(table_offset + flushes * (destinations + 1) * 8)
        counts = np.frombuffer(file.read(destinations * 8), np.int64)
        return json.loads(file.read(summary_bytes)), counts


def read_sections(url: str, destination: int, token_dtype: type[np.unsignedinteger]) -> Iterator[Section]:
    """The sections of one destination, in the order in which they were written."""
    with storage.open_read(url) as file:
        for start, stop in _section_bounds(file, url, destination):
            file.seek(start)
            yield _parse_section(file.read(stop - start), token_dtype)


def read_sizes(url: str, destination: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of one destination's documents, in order, `document_ids`, `document_lengths` and `sentence_counts` alone."""
    kinds = (np.uint64, np.uint32, np.uint32)
    parts = [tuple(np.empty(0, kind) for kind in kinds)]
    with storage.open_read(url) as file:
        for start, _ in _section_bounds(file, url, destination):
            file.seek(start)
            documents, _, _ = _SECTION.unpack(file.read(_SECTION.size))
            parts.append(tuple(np.frombuffer(file.read(documents * np.dtype(kind).itemsize), kind) for kind in kinds))
    ids, lengths, counts = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return ids, lengths, counts


def _section_bounds(file: BinaryIO, url: str, destination: int) -> list[tuple[int, int]]:
    """Where the sections of a destination begin and end, the empty ones left out."""
    flushes, destinations, table_offset, _ = _read_trailer(file, url)
    bounds = []
    for flush in range(flushes):
        file.seek(table_offset + (flush * (destinations + 1) + destination) * 8)
        start, stop = struct.unpack("<QQ", file.read(16))
        if stop > start:
            bounds.append((start, stop))
    return bounds


def _parse_section(data: bytes, token_dtype: type[np.unsignedinteger]) -> Section:
    documents, sentences, tokens = _SECTION.unpack_from(data)
    offset = _SECTION.size
    arrays = []
    for count, dtype in (
        (documents, np.uint64),
        (documents, np.uint32),
        (documents, np.uint32),
        (sentences, np.uint32),
        (tokens, token_dtype),
    ):
        arrays.append(np.frombuffer(data, dtype, count, offset))
        offset += arrays[-1].nbytes
    return Section(*arrays)


def _read_trailer(file: BinaryIO, url: str) -> tuple[int, int, int, int]:
    file.seek(0, 2)
    end = file.tell()
    file.seek(max(0, end - _TRAILER.size))
    data = file.read()
    magic, *values = _TRAILER.unpack(data) if len(data) == _TRAILER.size else (b"",)
    if magic != _MAGIC:
        raise UserError(f"{storage.redact(url)} is damaged; run the same command again with --fresh")
    flushes, destinations, table_offset, summary_bytes = values
    return flushes, destinations, table_offset, summary_bytes
