"""Opening a data set in Python: its manifest, its counts and its decoded documents; and verifying it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data_prep.base.errors import UsageError, UserError
from data_prep.base.local_paths import home_in
from data_prep.dataset.manifest import TOKENIZER_FOLDER, Manifest, read_manifest
from data_prep.dataset.manifest_records import ShardRecord, SourceRecord
from data_prep.dataset.provenance_sidecar import ShardProvenance
from data_prep.dataset.shard_documents import ShardDocuments, all_shards, find_document
from data_prep.dataset.shards import Record, read_records
from data_prep.dataset.verification import raise_problems, verify_shards
from data_prep.dataset.versions import select_version
from data_prep.documents.document import DOCUMENT_ID, Document
from data_prep.executors.executors import Executor
from data_prep.reports.inspection import find_named, is_document_id, parse_document_id
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import Tokenizer

Split = Literal["train", "valid"]
StorageOptions = Mapping[str, Mapping[str, Any]] | None


class Dataset:
    """An opened data set, read with the storage options with which it was opened; iterate over it for its documents.

    Attributes:
        folder: path or URL.
        manifest: shards, sources, counts, configuration and checksums.
    """

    def __init__(self, folder: str, manifest: Manifest) -> None:
        """Use `open_dataset`."""
        self.folder, self.manifest = folder, manifest
        self._options = storage.options()

    def __repr__(self) -> str:
        return (
            f"<Dataset {storage.redact(self.folder)} version {self.manifest.version}: "
            f"{self.num_documents:,} documents, {self.num_tokens:,} tokens in {len(self.manifest.shards):,} shards>"
        )

    def __len__(self) -> int:
        return self.num_documents

    def __iter__(self) -> Iterator[Document]:
        return self.documents()

    @property
    def num_documents(self) -> int:
        return self.manifest.train.documents + self.manifest.valid.documents

    @property
    def num_sentences(self) -> int:
        """0 for a data set prepared with `documents.sentences: none`."""
        return self.manifest.num_sentences or 0

    @property
    def num_tokens(self) -> int:
        return self.manifest.train.tokens + self.manifest.valid.tokens

    @property
    def sources(self) -> dict[str, SourceRecord]:
        """Counts, license and drops of every source by its name."""
        return {source.name: source for source in self.manifest.sources}

    @property
    def dropped(self) -> dict[str, int]:
        """Number of dropped documents by reason."""
        return self.manifest.dropped

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the data set."""
        with storage.own_options(self._options):
            return Tokenizer.load(storage.join(self.folder, TOKENIZER_FOLDER))

    def documents(self, split: Split | None = None) -> Iterator[Document]:
        """Yield the decoded documents of a split, or of both, in the order of the shards; one record in memory.

        The text is the normalized one, without paragraph breaks. `id` (the corpus id), `url` and `metadata` come from
        the provenance, if the data set has it; `document_id` is the data set's own id of 16 hexadecimal digits.

        Raises:
            UserError: a shard is missing or damaged.
        """
        shards = (shard for name, shard in all_shards(self.manifest) if split in (None, name))
        documents = (document for shard in shards for document in self._documents_of(shard))
        while True:
            with storage.own_options(self._options):  # the caller of the iterator keeps its own
                document = next(documents, None)
            if document is None:
                return
            yield document

    def document(
        self, document_id: str | int | None = None, *, corpus_id: str | None = None, url: str | None = None
    ) -> Document:
        """Return a document by one of its names.

        Args:
            document_id: the id that `inspect` shows, exactly 16 hexadecimal digits, or its number; any other text is
                looked up as a corpus id, if the data set has provenance.
            corpus_id: value of `documents.id_field`, exactly.
            url: value of `documents.url_field`, exactly.

        Raises:
            UsageError: not exactly one name is given.
            UserError: no document has it, several have it, or the data set is damaged.
        """
        if sum(name is not None for name in (document_id, corpus_id, url)) != 1:
            raise UsageError(
                "document() takes exactly one of document_id, corpus_id and url",
                fix="give one of them",
                code="contradicting-arguments",
            )
        with storage.own_options(self._options):
            return self._named(document_id, corpus_id, url)

    def _named(self, document_id: str | int | None, corpus_id: str | None, url: str | None) -> Document:
        if isinstance(document_id, str) and not is_document_id(document_id) and self.manifest.provenance_files:
            document_id, corpus_id = None, document_id
        if isinstance(document_id, int):
            return self._found(document_id)
        if document_id is not None:
            return self._found(parse_document_id(document_id))
        column: Literal["id", "url"] = "id" if corpus_id is not None else "url"
        value = corpus_id if corpus_id is not None else url
        assert value is not None
        found = find_named(self.folder, self.manifest, column, value)
        if len(found) > 1:
            listed = ", ".join(f"{number:016x}" for number in found[:5]) + (" ..." if found[5:] else "")
            raise UserError(
                f"{len(found):,} documents of {storage.redact(self.folder)} have {column} {value[:200]!r}: {listed}",
                fix="give one of these document ids",
                code="several-documents",
            )
        return self._found(found[0])

    def _found(self, number: int) -> Document:
        pieces: list[np.ndarray] = []
        location = None
        for location in find_document(self.folder, number, self.manifest):
            opened = ShardDocuments(self.folder, self.manifest, location.split, location.shard)
            pieces.extend(opened.sentences(location.number))
        assert location is not None, "find_document raises if there is none"
        provenance = ShardProvenance(self.folder, location.shard.provenance)
        return self._document(number, np.concatenate(pieces), self.manifest.sources.index(location.source), provenance)

    def _documents_of(self, shard: ShardRecord) -> Iterator[Document]:
        with tempfile.TemporaryDirectory(prefix="clozeworks-") as cache:
            path = storage.local_copy(storage.join(self.folder, shard.name), Path(cache), shard.sha256)
            provenance = ShardProvenance(self.folder, shard.provenance)
            for _, record, _ in read_records(path):
                yield from self._documents_in(record, provenance)

    def _documents_in(self, record: Record, provenance: ShardProvenance) -> Iterator[Document]:
        stops = [*record.documents[1:].tolist(), len(record.tokens)]
        for start, stop, identity, source in zip(
            record.documents.tolist(), stops, record.document_ids.tolist(), record.sources.tolist(), strict=True
        ):
            yield self._document(identity, record.tokens[start:stop], source, provenance)

    def _document(self, identity: int, tokens: np.ndarray, source: int, provenance: ShardProvenance) -> Document:
        if int(tokens.max(initial=0)) >= self.tokenizer.vocab_size or source >= len(self.manifest.sources):
            raise UserError(
                f"{storage.redact(self.folder)} is damaged at document {identity:016x}",
                fix="restore it; 'clozeworks verify' lists everything that is damaged",
                code="damaged-shard",
            )
        record = self.manifest.sources[source]
        text = self.tokenizer.decode(tokens.tolist()).removeprefix(" ")
        row = provenance.row(identity, record.name)
        metadata = {} if row is None or row.metadata is None else json.loads(row.metadata)
        return Document(
            text,
            row.id if row is not None else None,
            record.name,
            record.language,
            row.url if row is not None else None,
            {**metadata, DOCUMENT_ID: f"{identity:016x}"},
        )


@home_in("folder")
def open_dataset(
    folder: str | Path, version: int | str | None = None, *, storage_options: StorageOptions = None
) -> Dataset:
    """Open a data set at a path or URL.

    Args:
        version: number or digest of an older version; by default the current one.
        storage_options: as in a configuration, such as `{"s3://corpus": {"profile": "research"}}`; they hold for this
            call and for the data set that it returns.

    Raises:
        UsageError: the storage options are not by URL prefix.
        UserError: there is no complete data set, or no such version.
    """
    location = os.fspath(folder)
    with storage.own_options(storage_options):
        return Dataset(location, read_manifest(location) if version is None else select_version(location, str(version)))


@home_in("folder")
def verify(
    folder: str | Path,
    version: int | str | None = None,
    *,
    executor: Executor | int = 1,
    storage_options: StorageOptions = None,
) -> Dataset:
    """Check every byte and count of a data set; return it if it is sound.

    Args:
        executor: an executor, or the number of processes.
        storage_options: as `open_dataset` takes them.

    Raises:
        UsageError: the storage options are not by URL prefix.
        UserError: code "damaged-data-set"; its `problems` lists all of them.
    """
    location = storage.absolute(os.fspath(folder))
    with storage.own_options(storage_options):
        manifest, problems = verify_shards(location, executor, None if version is None else str(version))
        raise_problems(location, problems)
        return Dataset(location, manifest)
