"""The work file of one unit: its encoded documents, sectioned by the shard that they will go to.

A file is written front to back in bounded memory: now and then the buffered documents are written as one
section for each destination, and the table of all sections stands at the end. So a shard reads its own
sections by offset. Every part has its checksum behind it, since work may lie on a disk for
weeks: reading raises a `UserError` where one is not as it was written, or an earlier release wrote it.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import xxhash

from data_prep.dataset.shard_index import starts_of
from data_prep.storage import storage
from data_prep.storage.sealing import CHECKSUM_BYTES, damaged, read_sealed, sealed

FLUSH_BYTES = 64 << 20
"""Held before it is written, in bytes."""

_VALUES_AT_ONCE = 1 << 20
_MAGIC = b"clozese2"  # that of earlier releases, without checksums, is clozesec
_TRAILER = struct.Struct("<8sQQQQ")  # magic, flushes, destinations, offset of the table, bytes of the summary
_ENTRY = struct.Struct("<QQQQ")  # of the table, a `_Place`
_SIZES_BYTES = 16  # of a document's id, length and number of sentences, which are read without the rest


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
        self._entries: list[bytes] = []  # of each flush
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
        self._file.writelines(self._entries)
        data = json.dumps(summary).encode()
        self._file.write(sealed(self._document_counts.tobytes() + data))
        sizes = len(self._entries), self._num_destinations, table_offset, len(data)
        self._file.write(sealed(_TRAILER.pack(_MAGIC, *sizes)))

    def _flush(self) -> None:
        """Write the waiting documents in order of their destinations, else in the order in which they came."""
        documents = join_sections([section for section, _ in self._waiting])
        destinations = np.concatenate([destinations for _, destinations in self._waiting])
        self._waiting, self._waiting_bytes = [], 0
        order = np.argsort(destinations, kind="stable")
        bounds = np.searchsorted(destinations[order], np.arange(self._num_destinations + 1))
        token_starts = starts_of(documents.document_lengths)
        sentence_starts = starts_of(documents.sentence_counts)
        entries = []
        for first, last in itertools.pairwise(bounds.tolist()):
            mine = order[first:last]
            lengths, counts = documents.document_lengths[mine], documents.sentence_counts[mine]
            sizes = len(mine), int(counts.sum(dtype=np.int64)), int(lengths.sum(dtype=np.int64))
            entries.append(sealed(_ENTRY.pack(self._file.tell(), *sizes)))
            if len(mine):
                ids = documents.document_ids[mine]
                self._file.write(sealed(ids.tobytes() + lengths.tobytes() + counts.tobytes()))
                hasher = xxhash.xxh3_64()
                self._write_runs(documents.sentence_lengths, sentence_starts[mine], counts, hasher)
                self._write_runs(documents.tokens.astype(self._dtype, copy=False), token_starts[mine], lengths, hasher)
                self._file.write(hasher.digest())
        self._entries.append(b"".join(entries))

    def _write_runs(self, values: np.ndarray, starts: np.ndarray, lengths: np.ndarray, hasher: xxhash.xxh3_64) -> None:
        """Write runs of values one after the other, a bounded number at once, and hash them."""
        stops = np.cumsum(lengths, dtype=np.int64)
        cuts = np.searchsorted(stops, np.arange(_VALUES_AT_ONCE, int(stops[-1]), _VALUES_AT_ONCE))
        for first, last in itertools.pairwise([0, *cuts.tolist(), len(lengths)]):
            data = take_runs(values, starts[first:last], lengths[first:last]).tobytes()
            self._file.write(data)
            hasher.update(data)


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
    """The documents of all sections in order; there is one at least. One alone, maybe of a huge document, as it is."""
    if len(sections) == 1:
        return sections[0]
    return Section(*(np.concatenate(arrays) for arrays in zip(*map(Section.arrays, sections), strict=True)))


def read_summary(url: str) -> tuple[dict[str, Any], np.ndarray]:
    """The summary of a work file, and its number of documents for each destination."""
    with storage.open_read(url) as file:
        flushes, destinations, table_offset, summary_bytes = _read_trailer(file, url)
        table_bytes = flushes * destinations * (_ENTRY.size + CHECKSUM_BYTES)
        data = read_sealed(file, url, table_offset + table_bytes, destinations * 8 + summary_bytes)
        return json.loads(bytes(data[destinations * 8 :])), np.frombuffer(data, np.int64, destinations)


def read_sections(url: str, destination: int, token_dtype: type[np.unsignedinteger]) -> Iterator[Section]:
    """The sections of one destination, in the order in which they were written."""
    token_bytes = np.dtype(token_dtype).itemsize
    with storage.open_read(url) as file:
        for place in _places(file, url, destination):
            sizes = _read_sizes(file, url, place)
            lengths_bytes = place.sentences * 4
            offset = place.offset + place.documents * _SIZES_BYTES + CHECKSUM_BYTES
            data = read_sealed(file, url, offset, lengths_bytes + place.tokens * token_bytes)
            lengths = np.frombuffer(data[:lengths_bytes], np.uint32)
            yield Section(*sizes, lengths, np.frombuffer(data[lengths_bytes:], token_dtype))


def read_sizes(url: str, destination: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of one destination's documents, in order, `document_ids`, `document_lengths` and `sentence_counts` alone."""
    parts = [(np.empty(0, np.uint64), np.empty(0, np.uint32), np.empty(0, np.uint32))]
    with storage.open_read(url) as file:
        parts.extend(_read_sizes(file, url, place) for place in _places(file, url, destination))
    ids, lengths, counts = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return ids, lengths, counts


class _Place(NamedTuple):
    """Where a section begins, and how much it holds."""

    offset: int
    documents: int
    sentences: int
    tokens: int


def _places(file: BinaryIO, url: str, destination: int) -> list[_Place]:
    """The places of a destination's sections, the empty ones left out."""
    flushes, destinations, table_offset, _ = _read_trailer(file, url)
    entry_bytes = _ENTRY.size + CHECKSUM_BYTES
    entries = [
        read_sealed(file, url, table_offset + (flush * destinations + destination) * entry_bytes, _ENTRY.size)
        for flush in range(flushes)
    ]
    places = [_Place(*_ENTRY.unpack(entry)) for entry in entries]
    return [place for place in places if place.documents]


def _read_sizes(file: BinaryIO, url: str, place: _Place) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    num = place.documents
    data = read_sealed(file, url, place.offset, num * _SIZES_BYTES)
    ids, lengths = np.frombuffer(data, np.uint64, num), np.frombuffer(data, np.uint32, num, num * 8)
    return ids, lengths, np.frombuffer(data, np.uint32, num, num * 12)


def _read_trailer(file: BinaryIO, url: str) -> tuple[int, ...]:
    """Flushes, destinations, offset of the table, bytes of the summary."""
    offset = file.seek(0, 2) - _TRAILER.size - CHECKSUM_BYTES
    magic, *values = _TRAILER.unpack(read_sealed(file, url, max(0, offset), _TRAILER.size))
    if magic != _MAGIC:
        raise damaged(url)
    return tuple(values)
