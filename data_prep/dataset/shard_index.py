"""The index of a shard: lengths of its records, documents and sentences, to plan and read rows without the tar."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import safetensors.numpy

from data_prep.base.errors import UserError
from data_prep.dataset.manifest_records import REBUILD, ShardRecord, read_file
from data_prep.storage import storage

TENSOR_FAULTS = (safetensors.SafetensorError, ValueError, TypeError, LookupError)
"""What reading a safetensors file may raise: a KeyError, for one, where its numbers are of a type unknown to numpy."""


@dataclass(frozen=True)
class ShardIndex:
    """The lengths of everything in a shard of R records, D documents and S sentences, in the order of the tar.

    Attributes:
        document_lengths: (D,) uint32 tokens of each document.
        sentence_counts: (D,) uint32 sentences of each document.
        sentence_lengths: (S,) uint32 tokens of each sentence.
        document_ids: (D,) uint64 xxh3_64 of each document's normalized text.
        document_sources: (D,) uint16 number of each document's source in the manifest.
        record_document_counts: (R,) uint32 documents in each record.
        token_offsets: (R,) uint64 byte offset in the tar at which the token data of each record begins.
    """

    document_lengths: np.ndarray
    sentence_counts: np.ndarray
    sentence_lengths: np.ndarray
    document_ids: np.ndarray
    document_sources: np.ndarray
    record_document_counts: np.ndarray
    token_offsets: np.ndarray


_INDEX_DTYPES = {
    "document_lengths": np.uint32,
    "sentence_counts": np.uint32,
    "sentence_lengths": np.uint32,
    "document_ids": np.uint64,
    "document_sources": np.uint16,
    "record_document_counts": np.uint32,
    "token_offsets": np.uint64,
}


def read_index(folder: str, shard: ShardRecord) -> ShardIndex:
    """Read a shard's index and check it: its sha256, its arrays among themselves, and the manifest's counts.

    Raises:
        UserError: the index is missing, damaged, or belongs to another shard.
    """
    data, where = read_file(folder, shard.index), storage.redact(storage.join(folder, shard.index.name))
    try:
        index = ShardIndex(**safetensors.numpy.load(data))
    except TENSOR_FAULTS as error:
        raise UserError(f"{where} is not the index of a shard ({error})", fix=REBUILD, code="damaged-index") from None
    problem = _index_problem(index, shard)
    if problem:
        raise UserError(f"{where} {problem}", fix=REBUILD, code="damaged-index")
    return index


def join_indexes(parts: list[ShardIndex]) -> ShardIndex:
    """Return the index of a shard that contains these parts in order."""
    return ShardIndex(
        **{
            name: np.concatenate([getattr(part, name) for part in parts] or [np.empty(0)]).astype(dtype)
            for name, dtype in _INDEX_DTYPES.items()
        }
    )


def starts_of(lengths: np.ndarray) -> np.ndarray:
    """Return the start offsets of consecutive runs of these lengths, (n,) int64, the first 0."""
    starts: np.ndarray = np.cumsum(lengths, dtype=np.int64) - lengths
    return starts


def _index_problem(index: ShardIndex, shard: ShardRecord) -> str | None:
    """Describe what is wrong with an index; None if nothing is."""
    for name, dtype in _INDEX_DTYPES.items():
        array = getattr(index, name)
        if array.dtype != dtype or array.ndim != 1:
            return f"has {name} of type {array.dtype} and {array.ndim} dimensions"
    documents, records = len(index.document_lengths), len(index.token_offsets)
    if (documents, len(index.sentence_lengths), records) != (shard.documents, shard.sentences, shard.records):
        return "counts other documents, sentences or records than the manifest"
    if len({documents, len(index.sentence_counts), len(index.document_ids), len(index.document_sources)}) > 1:
        return "has arrays of different numbers of documents"
    if len(index.record_document_counts) != records or index.record_document_counts.sum(dtype=np.int64) != documents:
        return "has records that do not add up to its documents"
    if (
        not all(getattr(index, name).all() for name in list(_INDEX_DTYPES)[:3])
        or not index.record_document_counts.all()
    ):
        return "has an empty document, sentence or record"
    if index.sentence_counts.sum(dtype=np.int64) != shard.sentences:
        return "has sentences that belong to no document"
    firsts = starts_of(index.sentence_counts)
    by_document = np.add.reduceat(index.sentence_lengths.astype(np.int64), firsts) if documents else np.empty(0)
    if not np.array_equal(by_document, index.document_lengths) or by_document.sum() != shard.tokens:
        return "has sentences that do not add up to its documents' tokens"
    if (np.diff(index.token_offsets.astype(np.int64)) <= 0).any() or (index.token_offsets >= shard.bytes).any():
        return "has byte offsets that are not increasing within the shard"
    first_documents = starts_of(index.record_document_counts)
    by_record = np.add.reduceat(by_document, first_documents) if records else np.empty(0)
    if (index.token_offsets.astype(np.int64) + 2 * by_record > shard.bytes).any():  # a token takes at least 2 bytes
        return "has records that reach beyond the end of the shard"
    return None
