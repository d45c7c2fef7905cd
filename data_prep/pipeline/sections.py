"""Work files: encoded documents in sections, so that a reader of one section reads only its documents.

A file is written front to back in bounded memory: from time to time the buffered documents are written as a row of a
parts file, one section for each number. The provenance of a document is JSON with source, id, URL, metadata and
optional kept_as.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from data_prep.dataset.provenance_sidecar import ProvenanceRow
from data_prep.dataset.shards import starts_of
from data_prep.documents.document import Document
from data_prep.storage.work_files import PartsWriter, open_parts
from data_prep.text.cleaning import replace_surrogates

FLUSH_BYTES = 64 << 20
"""Held before it is written, in bytes."""

_VALUES_AT_ONCE = 1 << 20
_LONG_RUN = 64  # values of a run from where copying runs takes less time than gathering values
_KIND = b"clozese4"
_COUNTS = struct.Struct("<QQQQ")  # at the beginning of a section, a `_Counts`; a section without documents is empty
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
        provenance: (P,) uint8 see `pack_provenance`.
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
        self._parts = PartsWriter(file, _KIND, num_sections)
        self._dtype = token_dtype
        self._num_sections = num_sections
        self._waiting: list[tuple[Section, np.ndarray]] = []
        self._waiting_bytes = 0
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
        self._parts.close({"document_counts": self._document_counts.tolist(), "summary": summary})

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
        for first, last in itertools.pairwise(bounds.tolist()):
            mine = order[first:last]
            with self._parts.part() as write:
                if len(mine):
                    write(_COUNTS.pack(len(mine), *(int(lengths[mine].sum(dtype=np.int64)) for _, _, lengths in runs)))
                    for name, dtype in _DOCUMENT_DTYPES.items():
                        write(getattr(documents, name)[mine].astype(dtype, copy=False).tobytes())
                    for values, starts, lengths in runs:
                        _write_runs(values, starts[mine], lengths[mine], write)


def _write_runs(values: np.ndarray, starts: np.ndarray, lengths: np.ndarray, write: Callable[[bytes], None]) -> None:
    """Write runs of values in order, a bounded number at once."""
    stops = np.cumsum(lengths, dtype=np.int64)
    cuts = np.searchsorted(stops, np.arange(_VALUES_AT_ONCE, int(stops[-1]), _VALUES_AT_ONCE))
    for first, last in itertools.pairwise([0, *cuts.tolist(), len(lengths)]):
        write(take_runs(values, starts[first:last], lengths[first:last]).tobytes())


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
    with open_parts(url, _KIND) as parts:
        table = parts.table()
    return table["summary"], np.array(table["document_counts"], np.int64)


def read_sections(url: str, number: int, token_dtype: type[np.unsignedinteger]) -> Iterator[Section]:
    """Yield the documents of the section of this number, in the parts and order in which they were written."""
    with open_parts(url, _KIND) as parts:
        for row in range(parts.num_rows):
            if data := parts.read(row, number):
                yield _section(data, np.dtype(token_dtype))


class _Counts(NamedTuple):
    """What a section holds."""

    documents: int
    sentences: int
    provenance_bytes: int
    tokens: int


def _section(data: memoryview, token_dtype: np.dtype[Any]) -> Section:
    held = _Counts(*_COUNTS.unpack_from(data))
    dtypes: dict[str, np.dtype[Any]] = {
        **_DOCUMENT_DTYPES,
        "sentence_lengths": np.dtype("<u4"),
        "provenance": np.dtype("u1"),
        "tokens": token_dtype,
    }
    counts = dict.fromkeys(_DOCUMENT_DTYPES, held.documents)
    counts |= {"sentence_lengths": held.sentences, "provenance": held.provenance_bytes, "tokens": held.tokens}
    arrays, offset = {}, _COUNTS.size
    for name, dtype in dtypes.items():
        arrays[name] = np.frombuffer(data, dtype, counts[name], offset)
        offset += counts[name] * dtype.itemsize
    return Section(**arrays)


def pack_provenance(documents: Sequence[Document]) -> dict[str, np.ndarray]:
    """Return `provenance_lengths` and `provenance` of a `Section` of these documents."""
    packed = [_packed(document).encode() for document in documents]
    return {
        "provenance_lengths": np.array([len(data) for data in packed], np.uint32),
        "provenance": np.frombuffer(b"".join(packed), np.uint8),
    }


def unpack_provenance(section: Section) -> Iterator[ProvenanceRow]:
    """Return the rows of the documents with provenance."""
    if not len(section.provenance):
        return
    data, starts = section.provenance.tobytes(), starts_of(section.provenance_lengths).tolist()
    ids = section.document_ids.tolist()
    for number, length in enumerate(section.provenance_lengths.tolist()):
        if length:
            source, own_id, url, metadata, *kept = json.loads(data[starts[number] : starts[number] + length])
            kept_as = kept[0] if kept else ids[number]
            yield ProvenanceRow(ids[number], source, own_id, url, metadata, kept_as)


def with_kept_as(section: Section, kept_as: np.ndarray) -> Section:
    """Return only the provenance of dropped documents that the documents of ids (D,) uint64 represent."""
    data, starts = section.provenance.tobytes(), starts_of(section.provenance_lengths).tolist()
    packed = []
    for start, length, kept in zip(starts, section.provenance_lengths.tolist(), kept_as.tolist(), strict=True):
        packed.append(json.dumps([*json.loads(data[start : start + length])[:4], kept]).encode() if length else b"")
    return Section(
        document_ids=section.document_ids,
        document_lengths=np.zeros(len(packed), np.uint32),
        sentence_counts=np.zeros(len(packed), np.uint32),
        sentence_lengths=section.sentence_lengths[:0],
        tokens=section.tokens[:0],
        sources=section.sources,
        provenance_lengths=np.array([len(each) for each in packed], np.uint32),
        provenance=np.frombuffer(b"".join(packed), np.uint8),
    )


def _packed(document: Document) -> str:
    metadata = None
    if document.metadata:
        metadata = json.dumps(dict(document.metadata), ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    values = (document.source, document.id, document.url, metadata)
    return json.dumps([None if value is None else replace_surrogates(value) for value in values])
