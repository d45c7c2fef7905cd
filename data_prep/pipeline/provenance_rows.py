"""Provenance of documents in work files: JSON with source, id, URL, metadata and optional kept_as."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np

from data_prep.dataset.provenance_sidecar import ProvenanceRow
from data_prep.dataset.shards import starts_of
from data_prep.documents.document import Document
from data_prep.pipeline.sections import Section
from data_prep.text.cleaning import replace_surrogates


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
