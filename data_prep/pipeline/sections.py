"""Work files: encoded documents in sections, so that a reader of one section reads only its documents.

A file is written front to back in bounded memory: from time to time the buffered documents are written as one section
for each number, and the table of all sections is at the end. Every part is followed by its checksum, because work may
wait on a disk for weeks: reading raises `UserError` if a part is damaged or another release wrote it.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import xxhash

from data_prep.dataset.shard_index import starts_of
from data_prep.storage import storage
from data_prep.storage.sealing import CHECKSUM_BYTES, damaged, read_sealed, sealed

FLUSH_BYTES = 64 << 20
"""Held before it is written, in bytes."""

_VALUES_AT_ONCE = 1 << 20
_LONG_RUN = 64  # values of a run from where copying runs takes less time than gathering values
_MAGIC = b"clozese3"
_TRAILER = struct.Struct("<8sQQQQ")  # magic, flushes, sections, offset of the table, bytes of the summary
_ENTRY = struct.Struct("<QQQQQ")  # of the table, a `_Location`
_NONE = np.empty(0, np.uint8)


@dataclass(frozen=True)
class Section:
    """Documents in the order in which they were read. A document without tokens was dropped, and only its provenance is
    kept.

    Attributes:
        document_ids: (D,) uint64.
        document_lengths: (D,) uint32 tokens of each.
        sentence_counts: (D,) uint32 sentences of each.
        sentence_lengths: (S,) uint32 tokens of each sentence.
        tokens: (T,) uint16 or uint32.
        sources: (D,) uint16 number of the source of each in the plan; 0 if not given.
        provenance_lengths: (D,) uint32 bytes of each in `provenance`; 0 if not given.
        provenance: (P,) uint8 see `data_prep.pipeline.provenance_rows`.
    """

    document_ids: np.ndarray
    document_lengths: np.ndarray
    sentence_counts: np.ndarray
    sentence_lengths: np.ndarray
    tokens: np.ndarray
    sources: np.ndarray = field(default_factory=lambda: _NONE)
    provenance_lengths: np.ndarray = field(default_factory=lambda: _NONE)
    provenance: np.ndarray = field(default_factory=lambda: _NONE)

    def __post_init__(self) -> None:
        for name, dtype in (("sources", np.uint16), ("provenance_lengths", np.uint32)):
            if getattr(self, name) is _NONE:
                object.__setattr__(self, name, np.zeros(len(self.document_ids), dtype))

    def arrays(self) -> tuple[np.ndarray, ...]:
        return tuple(getattr(self, each.name) for each in fields(self))

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())


_DOCUMENT_DTYPES: dict[str, np.dtype[Any]] = {
    "document_ids": np.dtype("<u8"),
    "document_lengths": np.dtype("<u4"),
    "sentence_counts": np.dtype("<u4"),
    "provenance_lengths": np.dtype("<u4"),
    "sources": np.dtype("<u2"),
}


class SectionWriter:
    """Writer of a work file; `close` appends the table and a summary."""

    def __init__(self, file: BinaryIO, num_sections: int, token_dtype: type[np.unsignedinteger]) -> None:
        self._file = file
        self._dtype = token_dtype
        self._num_sections = num_sections
        self._waiting: list[tuple[Section, np.ndarray]] = []
        self._waiting_bytes = 0
        self._entries: list[bytes] = []  # of each flush
        self._document_counts = np.zeros(num_sections, np.int64)

    def add(self, documents: Section, numbers: np.ndarray) -> None:
        """Add documents, each with the number of its section, (D,) int64."""
        self._document_counts += np.bincount(numbers, minlength=self._num_sections)
        self._waiting.append((documents, numbers))
        self._waiting_bytes += documents.nbytes + numbers.nbytes
        if self._waiting_bytes >= FLUSH_BYTES:
            self._flush()

    def close(self, summary: dict[str, Any]) -> None:
        if self._waiting:
            self._flush()
        table_offset = self._file.tell()
        self._file.writelines(self._entries)
        data = json.dumps(summary).encode()
        self._file.write(sealed(self._document_counts.tobytes() + data))
        sizes = len(self._entries), self._num_sections, table_offset, len(data)
        self._file.write(sealed(_TRAILER.pack(_MAGIC, *sizes)))

    def _flush(self) -> None:
        """Write the buffered documents ordered by section, then by the order in which they were added."""
        documents = join_sections([section for section, _ in self._waiting])
        numbers = np.concatenate([numbers for _, numbers in self._waiting])
        self._waiting, self._waiting_bytes = [], 0
        order = np.argsort(numbers, kind="stable")
        bounds = np.searchsorted(numbers[order], np.arange(self._num_sections + 1))
        runs = (
            (documents.sentence_lengths, starts_of(documents.sentence_counts), documents.sentence_counts),
            (documents.provenance, starts_of(documents.provenance_lengths), documents.provenance_lengths),
            (
                documents.tokens.astype(self._dtype, copy=False),
                starts_of(documents.document_lengths),
                documents.document_lengths,
            ),
        )
        entries = []
        for first, last in itertools.pairwise(bounds.tolist()):
            mine = order[first:last]
            sizes = [int(lengths[mine].sum(dtype=np.int64)) for _, _, lengths in runs]
            entries.append(sealed(_ENTRY.pack(self._file.tell(), len(mine), *sizes)))
            if len(mine):
                hasher = xxhash.xxh3_64()
                for name, dtype in _DOCUMENT_DTYPES.items():
                    self._write(getattr(documents, name)[mine].astype(dtype, copy=False).tobytes(), hasher)
                for values, starts, lengths in runs:
                    self._write_runs(values, starts[mine], lengths[mine], hasher)
                self._file.write(hasher.digest())
        self._entries.append(b"".join(entries))

    def _write_runs(self, values: np.ndarray, starts: np.ndarray, lengths: np.ndarray, hasher: xxhash.xxh3_64) -> None:
        """Write runs of values in order, a bounded number at once."""
        stops = np.cumsum(lengths, dtype=np.int64)
        cuts = np.searchsorted(stops, np.arange(_VALUES_AT_ONCE, int(stops[-1]), _VALUES_AT_ONCE))
        for first, last in itertools.pairwise([0, *cuts.tolist(), len(lengths)]):
            self._write(take_runs(values, starts[first:last], lengths[first:last]).tobytes(), hasher)

    def _write(self, data: bytes, hasher: xxhash.xxh3_64) -> None:
        self._file.write(data)
        hasher.update(data)


def take_runs(values: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the concatenated runs of values, given by starts and lengths (n,)."""
    if len(starts) == 1:
        return values[starts[0] : starts[0] + lengths[0]]
    if len(starts) and int(lengths.sum(dtype=np.int64)) >= _LONG_RUN * len(starts):
        runs = zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
        return np.concatenate([values[start:stop] for start, stop in runs])
    offsets = np.repeat(starts - starts_of(lengths), lengths) + np.arange(lengths.sum(dtype=np.int64))
    taken: np.ndarray = values[offsets]
    return taken


def select_documents(section: Section, is_kept: np.ndarray) -> Section:
    """Return only the documents of a mask (D,)."""
    if is_kept.all():
        return section

    def runs(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return take_runs(values, starts_of(lengths)[is_kept], lengths[is_kept])

    return Section(
        document_ids=section.document_ids[is_kept],
        document_lengths=section.document_lengths[is_kept],
        sentence_counts=section.sentence_counts[is_kept],
        sentence_lengths=runs(section.sentence_lengths, section.sentence_counts),
        tokens=runs(section.tokens, section.document_lengths),
        sources=section.sources[is_kept],
        provenance_lengths=section.provenance_lengths[is_kept],
        provenance=runs(section.provenance, section.provenance_lengths),
    )


def join_sections(sections: Sequence[Section]) -> Section:
    """Return the documents of all sections in order; a single section, maybe a huge one, is returned as it is."""
    if len(sections) == 1:
        return sections[0]
    return Section(*(np.concatenate(arrays) for arrays in zip(*map(Section.arrays, sections), strict=True)))


def read_summary(url: str) -> tuple[dict[str, Any], np.ndarray]:
    """Return the summary of a work file, and the number of documents of each section, (num_sections,) int64."""
    with storage.open_read(url) as file:
        flushes, num_sections, table_offset, summary_bytes = _read_trailer(file, url)
        table_bytes = flushes * num_sections * (_ENTRY.size + CHECKSUM_BYTES)
        data = read_sealed(file, url, table_offset + table_bytes, num_sections * 8 + summary_bytes)
        return json.loads(bytes(data[num_sections * 8 :])), np.frombuffer(data, np.int64, num_sections)


def read_sections(url: str, number: int, token_dtype: type[np.unsignedinteger]) -> Iterator[Section]:
    """Yield the documents of the section of this number, in the parts and order in which they were written."""
    entry_bytes = _ENTRY.size + CHECKSUM_BYTES
    with storage.open_read(url) as file:
        flushes, num_sections, table_offset, _ = _read_trailer(file, url)
        for flush in range(flushes):
            offset = table_offset + (flush * num_sections + number) * entry_bytes
            location = _Location(*_ENTRY.unpack(read_sealed(file, url, offset, _ENTRY.size)))
            if location.documents:
                yield _read_section(file, url, location, np.dtype(token_dtype))


class _Location(NamedTuple):
    """Start and size of a section."""

    offset: int
    documents: int
    sentences: int
    provenance_bytes: int
    tokens: int


def _read_section(file: BinaryIO, url: str, location: _Location, token_dtype: np.dtype[Any]) -> Section:
    dtypes: dict[str, np.dtype[Any]] = {
        **_DOCUMENT_DTYPES,
        "sentence_lengths": np.dtype("<u4"),
        "provenance": np.dtype("u1"),
        "tokens": token_dtype,
    }
    counts = dict.fromkeys(_DOCUMENT_DTYPES, location.documents)
    counts |= {
        "sentence_lengths": location.sentences,
        "provenance": location.provenance_bytes,
        "tokens": location.tokens,
    }
    num_bytes = sum(counts[name] * dtype.itemsize for name, dtype in dtypes.items())
    data = read_sealed(file, url, location.offset, num_bytes)
    arrays, offset = {}, 0
    for name, dtype in dtypes.items():
        arrays[name] = np.frombuffer(data, dtype, counts[name], offset)
        offset += counts[name] * dtype.itemsize
    return Section(**arrays)


def _read_trailer(file: BinaryIO, url: str) -> tuple[int, ...]:
    """Flushes, sections, offset of the table, bytes of the summary."""
    offset = file.seek(0, 2) - _TRAILER.size - CHECKSUM_BYTES
    magic, *values = _TRAILER.unpack(read_sealed(file, url, max(0, offset), _TRAILER.size))
    if magic != _MAGIC:
        raise damaged(url)
    return tuple(values)
