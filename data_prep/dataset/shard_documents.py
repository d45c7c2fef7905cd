"""Single documents of a data set: found by id, and read by byte offset without reading their shard."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from data_prep.base.errors import UsageError, UserError
from data_prep.base.progress import Progress
from data_prep.dataset.manifest import Manifest, read_manifest
from data_prep.dataset.manifest_records import REBUILD, ShardRecord, SourceRecord
from data_prep.dataset.shards import read_index, starts_of
from data_prep.storage import storage


@dataclass(frozen=True)
class DocumentLocation:
    """Location of a document, or of one piece of a document that was split.

    Attributes:
        number: of the document in its shard, from 0.
        record_key: key of its record in the tar.
        number_in_record: from 0.
    """

    split: Literal["train", "valid"]
    shard: ShardRecord
    number: int
    record_key: str
    number_in_record: int
    document_id: int
    num_tokens: int
    num_sentences: int
    source: SourceRecord


class ShardDocuments:
    """The documents of one shard: its index is in memory, tokens are read document by document."""

    def __init__(self, folder: str, manifest: Manifest, split: Literal["train", "valid"], shard: ShardRecord) -> None:
        """Read the index."""
        self._url = storage.join(folder, shard.name)
        self._split, self._shard, self._sources = split, shard, manifest.sources
        self._dtype = np.dtype(manifest.tokenizer.token_dtype)
        self._vocab_size = manifest.tokenizer.vocab_size
        self._index = index = read_index(folder, shard)
        self._starts = starts_of(index.document_lengths)
        self._first_sentences = starts_of(index.sentence_counts)
        self._first_documents = starts_of(index.record_document_counts)
        if index.document_sources.max(initial=0) >= len(self._sources):
            where = storage.redact(storage.join(folder, shard.index.name))
            raise UserError(
                f"{where} names source {index.document_sources.max()}, and the manifest has {len(self._sources)}",
                fix=REBUILD,
                code="damaged-index",
            )

    def __len__(self) -> int:
        return len(self._index.document_lengths)

    def numbers_of(self, document_id: int) -> list[int]:
        """Return the numbers of the documents with this id: several for the pieces of one, none if it is elsewhere."""
        return np.flatnonzero(self._index.document_ids == np.uint64(document_id)).tolist()

    def first_of_sources(self) -> dict[int, int]:
        """Return the number of the first document of each source, by the number of the source."""
        sources, firsts = np.unique(self._index.document_sources, return_index=True)
        return dict(zip(sources.tolist(), firsts.tolist(), strict=True))

    def location(self, number: int) -> DocumentLocation:
        """Return the location and the source of document `number`."""
        record = self._record(number)
        prefix = self._shard.name.partition(".")[0].rpartition("-")[2]
        return DocumentLocation(
            split=self._split,
            shard=self._shard,
            number=number,
            record_key=f"{prefix}-{record:05d}",
            number_in_record=number - int(self._first_documents[record]),
            document_id=int(self._index.document_ids[number]),
            num_tokens=int(self._index.document_lengths[number]),
            num_sentences=int(self._index.sentence_counts[number]),
            source=self._sources[self._index.document_sources[number]],
        )

    def sentences(self, number: int) -> list[np.ndarray]:
        """Return the token ids of each sentence of document `number`."""
        record = self._record(number)
        token_bytes = self._dtype.itemsize
        tokens_before = int(self._starts[number] - self._starts[self._first_documents[record]])
        first_byte = int(self._index.token_offsets[record]) + tokens_before * token_bytes
        num_bytes = int(self._index.document_lengths[number]) * token_bytes
        # A forged index may come with a forged manifest: never allocate more than the file holds.
        if first_byte + num_bytes > storage.size(self._url):
            raise self._damaged_at(number)
        with storage.open_read(self._url) as file:
            file.seek(first_byte)
            data = file.read(num_bytes)
        if len(data) != num_bytes:
            raise self._damaged_at(number)
        tokens = np.frombuffer(data, self._dtype)
        if int(tokens.max()) >= self._vocab_size:
            raise self._damaged_at(number)
        first = int(self._first_sentences[number])
        lengths = self._index.sentence_lengths[first : first + int(self._index.sentence_counts[number])]
        return np.split(tokens, np.cumsum(lengths, dtype=np.int64)[:-1])

    def _damaged_at(self, number: int) -> UserError:
        return UserError(
            f"{storage.redact(self._url)} is damaged at document {number}",
            fix=f"{REBUILD}; 'clozeworks verify' lists everything that is damaged",
            code="damaged-shard",
        )

    def _record(self, number: int) -> int:
        return int(np.searchsorted(self._first_documents, number, side="right")) - 1


def all_shards(manifest: Manifest) -> Iterator[tuple[Literal["train", "valid"], ShardRecord]]:
    """Yield every shard with its split, train first."""
    for split in ("train", "valid"):
        for shard in manifest.split(split).shards:
            yield split, shard


def find_document(folder: str, document_id: int, manifest: Manifest | None = None) -> list[DocumentLocation]:
    """Find a document by its id in any shard; return all its pieces in the order of the shards.

    Args:
        manifest: of the version to search; by default the current one.
    """
    manifest = read_manifest(folder) if manifest is None else manifest
    shards = list(all_shards(manifest))
    found: list[DocumentLocation] = []
    with Progress("searching indexes", sum(shard.index.bytes for _, shard in shards), "MB", 1e6) as progress:
        for split, shard in shards:
            documents = ShardDocuments(folder, manifest, split, shard)
            found.extend(map(documents.location, documents.numbers_of(document_id)))
            progress.add(shard.index.bytes)
    if not found:
        total = sum(shard.documents for _, shard in shards)
        raise UsageError(
            f"{storage.redact(folder)} has no document {document_id:016x} among its {total:,}",
            fix="take an id that 'clozeworks inspect' shows (xxh3_64 of the normalized text, hexadecimal); if "
            "the id is right, the document was dropped or removed",
            code="unknown-document",
        )
    return found
