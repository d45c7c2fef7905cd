"""The first phase of preparation: one input unit is read, cleaned, encoded and sorted by destination shard."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from data_prep.base.errors import UserError
from data_prep.config.preparation_config import DeduplicationSettings, DocumentSettings
from data_prep.deduplication.near_duplicates import signatures_url
from data_prep.deduplication.signature_files import SignatureWriter, open_signatures
from data_prep.documents.document import Document
from data_prep.documents.documents import beyond_sha256, unit_sha256
from data_prep.documents.input_units import InputUnit
from data_prep.documents.languages import DocumentLanguages
from data_prep.documents.rejects import BadInput
from data_prep.filters.filtered_reader import FilteredReader
from data_prep.pipeline.encoding import document_id, encode_documents
from data_prep.pipeline.sections import Section, SectionWriter, read_summary
from data_prep.storage import storage
from data_prep.storage.hashing_files import NOTHING_BEYOND, Beyond
from data_prep.tokenizer.tokenizer import Tokenizer

__all__ = ["Destinations", "MapTask", "cached_tokenizer", "document_id", "map_unit", "sections_url"]

# Both bound memory: few long documents, or very many short ones.
_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 1 << 14


@dataclass(frozen=True)
class Destinations:
    """Where a document goes: a pure function of its id, the hash of its normalized text.

    The high half of the hash decides train or valid, so that neither other documents nor the number of shards
    moves a document across; the low half decides the shard. Train shards are destinations 0 to `num_train` -
    1, those of valid follow.
    """

    num_train: int
    num_valid: int
    valid_fraction: float

    def __len__(self) -> int:
        return self.num_train + self.num_valid

    def of(self, document_id: int) -> int:
        return int(self.of_many(np.array([document_id], np.uint64))[0])

    def of_many(self, document_ids: np.ndarray) -> np.ndarray:
        """The destinations (n,) int64 of document ids (n,) uint64."""
        high, low = document_ids >> np.uint64(32), document_ids & np.uint64(0xFFFFFFFF)
        is_valid = high < self.valid_fraction * 2**32
        destinations = np.where(
            is_valid, self.num_train + low % np.uint64(self.num_valid), low % np.uint64(self.num_train)
        )
        return destinations.astype(np.int64)

    def split(self, destination: int) -> Literal["train", "valid"]:
        return "train" if destination < self.num_train else "valid"


@dataclass(frozen=True)
class MapTask:
    """A unit of the first phase, with all it needs to be done anywhere.

    Attributes:
        language: of documents that name none of their own.
        tokenizer_folder: a folder or URL.
        text_field: of the unit's source; None for that of `settings`.
        source: name of the unit's source.
        filters_fingerprint: of `settings.filters` where the plan was made.
    """

    number: int
    unit: InputUnit
    language: str
    settings: DocumentSettings
    destinations: Destinations
    tokenizer_folder: str
    tokenizer_fingerprint: str
    work_folder: str
    text_field: str | None
    deduplication: DeduplicationSettings
    source: str = ""
    filters_fingerprint: str | None = None


def sections_url(work_folder: str, number: int) -> str:
    """Where the result of a unit lies."""
    return storage.join(work_folder, f"map-{number:06d}.sections")


_loaded: dict[tuple[str, str], Tokenizer] = {}


def keep_tokenizer(tokenizer: Tokenizer, folder: str) -> None:
    """Have `cached_tokenizer` give this one, which was loaded from `folder`, in this process."""
    _loaded.clear()
    _loaded[folder, tokenizer.fingerprint] = tokenizer


def load_tokenizer(folder: str) -> None:
    """Load the tokenizer at a folder or URL for `cached_tokenizer`.

    Raises:
        UserError: there is none.
    """
    keep_tokenizer(Tokenizer.load(folder), folder)


def cached_tokenizer(folder: str, fingerprint: str) -> Tokenizer:
    """The tokenizer at a folder or URL, loaded once in each process.

    Raises:
        UserError: the folder holds another tokenizer than the one that the preparation began with.
    """
    if (folder, fingerprint) in _loaded:
        return _loaded[folder, fingerprint]
    tokenizer = Tokenizer.load(folder)
    if tokenizer.fingerprint != fingerprint:
        raise UserError(
            f"tokenizer {storage.redact(folder)} changed while shards were made: its fingerprint is "
            f"{tokenizer.fingerprint} and was {fingerprint}; run the command again with --fresh"
        )
    keep_tokenizer(tokenizer, folder)
    return tokenizer


def map_unit(task: MapTask) -> int:
    """Write the unit's work file; its existence says that the unit is done. Returns the bytes of input worked on.

    Where near-duplicates are looked for, the file of the documents' signatures is there before it.
    """
    with storage.local_write(sections_url(task.work_folder, task.number)) as path:
        reader = FilteredReader(task.unit, task.settings, task.source, task.text_field, task.filters_fingerprint)
        try:
            _write(task, path, reader, lambda: _Read(reader.dropped, reader.sha256, reader.languages, reader.beyond))
        except BadInput as error:
            if not error.spoils_file or task.settings.on_bad_input == "error":
                raise
            sha256 = unit_sha256(task.unit, task.settings, task.text_field)
            found = _Read(Counter([error.reason]), sha256, DocumentLanguages(), NOTHING_BEYOND)
            _write(task, path, (), lambda: found)
    return task.unit.bytes


def has_same_input(task: MapTask) -> bool:
    """Whether what the finished unit was made of stands in its file still, whoever wrote that since."""
    values, _ = read_summary(sections_url(task.work_folder, task.number))
    beyond = Beyond(*values.get("beyond", NOTHING_BEYOND))
    if beyond.num_bytes and beyond_sha256(task.unit, beyond.num_bytes) != beyond.sha256:
        return False
    sha256: str = values["sha256"]
    return unit_sha256(task.unit, task.settings, task.text_field) == sha256


class _Read(NamedTuple):
    """What a `DocumentReader` tells when it is exhausted."""

    dropped: Counter[str]
    sha256: str
    languages: DocumentLanguages
    beyond: Beyond


def _write(
    task: MapTask,
    path: Path,
    documents: Iterable[Document],
    read: Callable[[], _Read],
) -> None:
    """Write what becomes of the documents; `read` tells, when they are all read, what `_Read` holds."""
    tokenizer = cached_tokenizer(task.tokenizer_folder, task.tokenizer_fingerprint)
    dropped: Counter[str] = Counter()
    smallest_ids: list[int] = []
    num_read = cut_words = 0
    with open(path, "wb") as file, _signature_writer(task) as signatures:
        writer = SectionWriter(file, len(task.destinations), tokenizer.token_dtype)
        for batch in _batches(documents):
            num_read += len(batch)
            encoded, num_cut = encode_documents(batch, tokenizer, task.settings, task.language, dropped)
            cut_words += num_cut
            if not len(encoded.document_ids):
                continue
            writer.add(encoded, task.destinations.of_many(encoded.document_ids))
            if signatures is not None:
                _sign(encoded, signatures)
            smallest_ids.append(int(encoded.document_ids.min()))
        found = read()
        dropped.update(found.dropped)
        if task.unit.whole and not num_read and not dropped:
            dropped["empty file"] += 1
        writer.close(
            {
                "dropped": dict(sorted(dropped.items())),
                "sha256": found.sha256,
                "beyond": found.beyond,
                "cut_words": cut_words,
                "smallest_id": min(smallest_ids, default=None),
                "languages": dataclasses.asdict(found.languages),
            }
        )


def _signature_writer(task: MapTask) -> Any:
    if not task.deduplication.near:
        return nullcontext()
    return open_signatures(signatures_url(task.work_folder, task.number), task.deduplication)


def _sign(encoded: Section, writer: SignatureWriter) -> None:
    documents = np.split(encoded.tokens, np.cumsum(encoded.document_lengths, dtype=np.int64)[:-1])
    for identity, tokens in zip(encoded.document_ids.tolist(), documents, strict=True):
        writer.add(identity, tokens)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
