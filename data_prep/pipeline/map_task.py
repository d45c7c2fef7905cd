"""The map task: reads, cleans and encodes one input unit and sorts its documents by destination shard."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_prep.base.errors import UserError
from data_prep.config.preparation_config import DeduplicationSettings, DocumentSettings
from data_prep.dataset.manifest_records import FileRecord
from data_prep.dataset.removed_names import ExcludedNames, removed_names
from data_prep.deduplication.near_duplicates import signatures_url
from data_prep.deduplication.signature_files import SignatureWriter, open_signatures
from data_prep.documents.document import Document
from data_prep.documents.documents import DocumentReader, beyond_sha256, unit_sha256
from data_prep.documents.formats.format_registry import check_formats
from data_prep.documents.input_units import InputUnit, has_fields
from data_prep.documents.languages import DocumentLanguages
from data_prep.documents.rejects import BadInput
from data_prep.filters.chain import FilterChain
from data_prep.pipeline.destinations import Destinations
from data_prep.pipeline.encoding import document_id, encode_documents
from data_prep.pipeline.sections import Section, SectionWriter, read_summary
from data_prep.pipeline.units import Unit
from data_prep.storage import storage
from data_prep.storage.hashing_files import NOTHING_BEYOND
from data_prep.tokenizer.tokenizer import Tokenizer

__all__ = ["Destinations", "MapTask", "cached_tokenizer", "document_id", "map_unit", "sections_url"]

# Both limits bound memory: for few long documents and for many short ones.
_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 1 << 14


@dataclass(frozen=True)
class MapTask:
    """A unit of the map phase, with everything needed to run it in any process.

    Attributes:
        language: of documents without a language of their own.
        tokenizer_folder: a folder or URL.
        text_field: of the unit's source; None uses that of `settings`.
        source: name of the unit's source.
        filters_fingerprint: of `settings.filters` when the plan was made.
        has_provenance: as `Plan.has_provenance`.
        formats: identities of the custom formats when the plan was made, by ending.
        data_set: the extended data set; `removed_names` are its files of removed URLs and corpus ids.
    """

    number: int
    unit: Unit
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
    has_provenance: bool = False
    formats: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    data_set: str = ""
    removed_names: tuple[FileRecord, ...] = ()


def sections_url(work_folder: str, number: int) -> str:
    """Return the URL of the result of a unit."""
    return storage.join(work_folder, f"map-{number:06d}.sections")


_loaded: dict[tuple[str, str], Tokenizer] = {}


def keep_tokenizer(tokenizer: Tokenizer, folder: str) -> None:
    """Make `cached_tokenizer` return this tokenizer, loaded from `folder`, in this process."""
    _loaded.clear()
    _loaded[folder, tokenizer.fingerprint] = tokenizer


def load_tokenizer(folder: str) -> None:
    """Load the tokenizer at a folder or URL for `cached_tokenizer`.

    Raises:
        UserError: there is none.
    """
    keep_tokenizer(Tokenizer.load(folder), folder)


def cached_tokenizer(folder: str, fingerprint: str) -> Tokenizer:
    """Return the tokenizer at a folder or URL, loaded once per process.

    Raises:
        UserError: the folder holds another tokenizer than at the start of the preparation.
    """
    if (folder, fingerprint) in _loaded:
        return _loaded[folder, fingerprint]
    tokenizer = Tokenizer.load(folder)
    if tokenizer.fingerprint != fingerprint:
        raise UserError(
            f"tokenizer {storage.redact(folder)} changed while shards were made: its fingerprint is "
            f"{tokenizer.fingerprint} and was {fingerprint}",
            fix="run the command again with --fresh",
            code="tokenizer-changed",
        )
    keep_tokenizer(tokenizer, folder)
    return tokenizer


def map_unit(task: MapTask) -> int:
    """Write the unit's work file, whose existence marks the unit as done; return the bytes of processed input.

    With a search for near-duplicates, the file of signatures is written first. If a part turns out to be damaged after
    some of its documents were used, the unit restarts without the part.
    """
    spoiled: dict[int, str] = {}
    while True:
        try:
            with storage.local_write(sections_url(task.work_folder, task.number)) as path:
                _write(task, path, spoiled)
            return task.unit.bytes
        except _SpoiledPart as found:
            spoiled[found.number] = found.reason


def changed_parts(task: MapTask) -> tuple[str, ...]:
    """Return the input files of a finished unit that have changed since."""
    summary, _ = read_summary(sections_url(task.work_folder, task.number))
    parts = zip(task.unit.parts, summary["parts"], strict=True)
    return tuple(part.url for part, values in parts if not _is_unchanged(task, part, PartRead(*values)))


class PartRead(NamedTuple):
    """The record of one part of a unit in the unit's file.

    Attributes:
        sha256: as `DocumentReader.sha256`.
        beyond_bytes: bytes read behind the part, with their sha256, as `DocumentReader.beyond`.
    """

    sha256: str
    beyond_bytes: int
    beyond_sha256: str


class _SpoiledPart(Exception):
    """A part of the unit is damaged or not text; some of its documents may have been used already."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(reason)
        self.number = number
        self.reason = reason


def _is_unchanged(task: MapTask, part: InputUnit, read: PartRead) -> bool:
    if read.beyond_bytes and beyond_sha256(part, read.beyond_bytes) != read.beyond_sha256:
        return False
    return unit_sha256(part, task.settings, task.text_field) == read.sha256


def _write(task: MapTask, path: Path, spoiled: Mapping[int, str]) -> None:
    """Write the documents of all parts except the `spoiled` ones, whose reasons are counted."""
    tokenizer = cached_tokenizer(task.tokenizer_folder, task.tokenizer_fingerprint)
    check_formats(task.settings.formats, task.formats)
    dropped: Counter[str] = Counter()
    languages = DocumentLanguages()
    reads: list[PartRead] = []
    cut_words = num_empty_files = 0
    with open(path, "wb") as file, _signature_writer(task) as signatures:
        writer = SectionWriter(file, task.destinations.num_sections, tokenizer.token_dtype)

        def add(batch: list[Document]) -> int:
            encoded, num_cut = encode_documents(
                batch, tokenizer, task.settings, task.language, dropped, task.has_provenance
            )
            if len(encoded.document_ids):
                sources = np.full(len(encoded.document_ids), task.unit.source, np.uint16)
                encoded = dataclasses.replace(encoded, sources=sources)
                writer.add(encoded, task.destinations.groups_of(encoded.document_ids))
                if signatures is not None:
                    _sign(encoded, signatures)
            return num_cut

        excluded = excluded_names(task.data_set, task.removed_names)
        filters = FilterChain(task.settings, task.filters_fingerprint)
        batches = _Batches(add, excluded)
        for number, part in enumerate(task.unit.parts):
            if number in spoiled:
                dropped[spoiled[number]] += 1
                reads.append(PartRead(unit_sha256(part, task.settings, task.text_field), *NOTHING_BEYOND))
                continue
            reader = DocumentReader(part, task.settings, task.text_field, task.source)
            reader.is_quiet = number <= max(spoiled, default=-1)
            num_read = batches.read(filters.apply(reader), part.name, number, task.settings)
            dropped.update(reader.dropped)
            if part.whole and not num_read and not reader.dropped:
                num_empty_files += 1
            if has_fields(part.url, part.format):
                languages.merge(reader.languages)
            reads.append(PartRead(reader.sha256, *reader.beyond))
        cut_words = batches.finish()
        if excluded is not None and excluded.dropped:
            dropped["removed earlier"] += excluded.dropped
        writer.close(
            {
                "source": task.unit.source,
                "dropped": dict(sorted(dropped.items())),
                "parts": reads,
                "cut_words": cut_words,
                "empty_files": num_empty_files,
                "languages": dataclasses.asdict(languages),
            }
        )


def excluded_names(data_set: str, files: tuple[FileRecord, ...]) -> ExcludedNames | None:
    """Return the names in these files of the extended data set, which its additions leave out; None without a file.

    Raises:
        UserError: a file is missing or damaged.
    """
    return ExcludedNames(removed_names(data_set, files)) if files else None


def _signature_writer(task: MapTask) -> Any:
    if not task.deduplication.near:
        return nullcontext()
    return open_signatures(signatures_url(task.work_folder, task.number), task.deduplication)


def _sign(encoded: Section, writer: SignatureWriter) -> None:
    documents = np.split(encoded.tokens, np.cumsum(encoded.document_lengths, dtype=np.int64)[:-1])
    for identity, tokens in zip(encoded.document_ids.tolist(), documents, strict=True):
        writer.add(identity, tokens)


class _Batches:
    """Documents of many parts, encoded in batches, without those of names that a takedown listed."""

    def __init__(self, add: Callable[[list[Document]], int], excluded: ExcludedNames | None) -> None:
        self._add, self._excluded = add, excluded
        self._batch: list[Document] = []
        self._characters = 0
        self._cut_words = 0

    def read(self, documents: Iterator[Document], name: str, number: int, settings: DocumentSettings) -> int:
        """Add the documents of part `number`, of the file `name`; return their number.

        Raises:
            BadInput: the policy is `error`.
            _SpoiledPart: no document of the part may be used.
        """
        num_read = 0
        try:
            for document in documents:
                num_read += 1
                if self._excluded is not None and self._excluded.excludes(document, name):
                    continue
                self._batch.append(document)
                self._characters += len(document.text)
                if self._characters >= _BATCH_CHARACTERS or len(self._batch) >= _BATCH_DOCUMENTS:
                    self._encode()
        except BadInput as error:
            if not error.spoils_file or settings.on_bad_input == "error":
                raise
            raise _SpoiledPart(number, error.reason) from None
        return num_read

    def finish(self) -> int:
        """Encode the rest; return how many words were encoded in parts."""
        if self._batch:
            self._encode()
        return self._cut_words

    def _encode(self) -> None:
        self._cut_words += self._add(self._batch)
        self._batch, self._characters = [], 0
