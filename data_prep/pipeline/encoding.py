"""Encoding of documents: cleaning, length limits, ids, and the tokens and sentences that the tokenizer makes.

The rows of a unit are its documents as lines of JSON in a work file, written while the unit is encoded: those that
filters and cleaning drop, with their reasons, and the texts of the others, with the ids by which deduplication decides
about them. `document_folders` makes files for users of them.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
import xxhash
import zstandard

from data_prep.config.preparation_config import DocumentSettings
from data_prep.documents.document import DOCUMENT_ID, Document
from data_prep.documents.drops import CLEANING, ENCODING, Drop
from data_prep.pipeline.job import Job
from data_prep.pipeline.sections import Section, pack_provenance
from data_prep.storage import storage
from data_prep.storage.work_files import PartsWriter, open_parts
from data_prep.text.cleaning import replace_surrogates
from data_prep.text.sentences import known_language
from data_prep.text.text_batch import TextBatch, normalize_batch
from data_prep.tokenizer.tokenizer import Tokenizer

Early = Sequence[tuple[int, Document, Drop]]
"""Documents that filters dropped: how many documents of the batch precede each, the document, and why."""

_KIND = b"clozerw1"
_COLUMNS = ("ids", "text", "dropped")  # of the parts of a batch; the lines are compressed
_KEPT_KIND = b"clozekp1"
_COMPRESSION_LEVEL = 1  # of files that are read once


def document_id(normalized: str) -> int:
    """Return the 64-bit id of a document: xxh3_64 of its normalized text."""
    return xxhash.xxh3_64_intdigest(normalized.encode())


class EncodedDocuments(NamedTuple):
    """The result of `encode_documents` for D documents.

    Attributes:
        section: the E documents that stay, encoded.
        num_cut_words: their words that were encoded in parts.
        drops: masks (D,) bool of the documents that are dropped; a document is in one of them at most.
        texts: the E documents that stay, normalized.
    """

    section: Section
    num_cut_words: int
    drops: Mapping[Drop, np.ndarray]
    texts: TextBatch

    def reasons(self) -> Iterator[Drop | None]:
        """Yield for each of the D documents why it is dropped; None for one that stays."""
        for number in range(len(self.drops[_EMPTY])):
            yield next((drop for drop, is_so in self.drops.items() if is_so[number]), None)


def encode_documents(
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    settings: DocumentSettings,
    dropped: Counter[Drop],
    has_provenance: bool = False,
) -> EncodedDocuments:
    """Encode the documents that are neither empty, too short nor too long; count the others in `dropped`.

    The language of the settings applies to documents without a known language. With `has_provenance` every document
    has its provenance.
    """
    batch = normalize_batch([document.text for document in documents], tokenizer.normalization)
    drops = _drops(batch, settings)
    is_kept = ~np.logical_or.reduce([*drops.values()])
    kept = [documents[number] for number in np.flatnonzero(is_kept).tolist()]
    batch = batch.select(is_kept)
    languages = None
    if settings.sentences == "split":
        languages = [known_language(document.language, settings.language) for document in kept]
    encoded = tokenizer.encode_batch([document.text for document in kept], batch, languages)
    if not encoded.has_tokens.all():
        drops[_WITHOUT_TOKENS] = np.zeros(len(documents), bool)
        drops[_WITHOUT_TOKENS][np.flatnonzero(is_kept)[~encoded.has_tokens]] = True
        kept = [document for document, is_so in zip(kept, encoded.has_tokens.tolist(), strict=True) if is_so]
        batch = batch.select(encoded.has_tokens)
    dropped.update({drop: int(is_so.sum()) for drop, is_so in drops.items() if is_so.any()})
    section = Section(
        document_ids=_document_ids(batch),
        document_lengths=encoded.lengths,
        sentence_counts=encoded.sentence_counts,
        sentence_lengths=encoded.sentence_lengths,
        tokens=encoded.tokens,
    )
    if has_provenance:
        section = dataclasses.replace(section, **pack_provenance(kept))
    return EncodedDocuments(section, encoded.num_cut_words, drops, batch)


_EMPTY, _WITHOUT_TOKENS = Drop(CLEANING, "empty"), Drop(ENCODING, "empty")


def _drops(batch: TextBatch, settings: DocumentSettings) -> dict[Drop, np.ndarray]:
    """Return masks (D,) bool of the documents beyond the limits; a document is in one of them at most."""
    num_bytes = np.diff(batch.document_starts)
    shortest, longest = settings.min_document_characters, settings.max_document_characters or np.iinfo(np.int64).max
    # Without the space before the text. Most texts have one byte per character; the maximum is four.
    num_characters = np.maximum(num_bytes - 1, 0)
    for number in np.flatnonzero((num_characters < 4 * shortest) | (num_characters > longest)).tolist():
        num_characters[number] = max(0, len(batch.document(number).decode()) - 1)
    is_empty = num_bytes == 0
    is_short = ~is_empty & (num_characters < shortest)
    too_short, too_long = Drop(CLEANING, "too short"), Drop(CLEANING, "too long")
    return {_EMPTY: is_empty, too_short: is_short, too_long: num_characters > longest}


def _document_ids(batch: TextBatch) -> np.ndarray:
    """Return the `document_id` of every text of the batch, (D,) uint64."""
    data = memoryview(batch.data)
    bounds = batch.document_starts.tolist()
    ids = [xxhash.xxh3_64_intdigest(data[start:stop]) for start, stop in zip(bounds, bounds[1:], strict=False)]
    return np.array(ids, np.uint64)


def rows_url(work_folder: str, unit: str) -> str:
    """Return the URL of the rows of the unit of this name."""
    return storage.join(work_folder, f"map-{unit}.rows")


class RowWriter:
    """Writer of the rows of a unit, batch by batch."""

    def __init__(self, file: BinaryIO, job: Job, source: int) -> None:
        self._parts, self._keeps = PartsWriter(file, _KIND, len(_COLUMNS)), job.keeps
        self._is_foreign = job.tokenizer().info.kind == "hugging_face"  # which encodes texts as they are written
        settings = job.reading.settings[source]
        own = {"id": settings.id_field, "url": settings.url_field, "language": settings.language_field}
        self._own_names = {"text", "source", DOCUMENT_ID, *(name for name, field in own.items() if field)}

    def add(self, documents: Sequence[Document], early: Early, encoded: EncodedDocuments) -> None:
        """Add a batch: the documents that were to be encoded, and those that filters dropped between them."""
        dropped: list[tuple[int, Document, Drop]] = []
        if "dropped" in self._keeps:
            judged = zip(documents, encoded.reasons(), strict=True)
            late = [(number, document, drop) for number, (document, drop) in enumerate(judged) if drop]
            dropped = sorted([*early, *late], key=lambda each: each[0])  # stable: a filter's come before the document
        ids, texts = encoded.section.document_ids, list[bytes]()
        if "text" in self._keeps:
            kept = [each for each, drop in zip(documents, encoded.reasons(), strict=True) if drop is None]
            cleaned = (each.text for each in kept) if self._is_foreign else cleaned_texts(encoded.texts)
            texts = [self._text_line(*each) for each in zip(kept, cleaned, ids.tolist(), strict=True)]
        self._parts.add(ids.astype("<u8").tobytes())
        self._parts.add(_packed(texts))
        self._parts.add(_packed(_dropped_line(document, drop) for _, document, drop in dropped))

    def close(self) -> None:
        self._parts.close({})

    def _text_line(self, document: Document, text: str, document_id: int) -> bytes:
        values = {"id": document.id, "source": document.source, "url": document.url, "language": document.language}
        record: dict[str, Any] = {"text": text, **{name: value for name, value in values.items() if value}}
        for name, value in sorted(document.metadata.items()):
            record[f"metadata.{name}" if name in self._own_names or name in record else name] = value
        line = json.dumps({**record, DOCUMENT_ID: f"{document_id:016x}"}, ensure_ascii=False)
        return (replace_surrogates(line) + "\n").encode()


def cleaned_texts(batch: TextBatch) -> Iterator[str]:
    """Yield each text of a batch with a blank line between its paragraphs, which is normalized to the same text."""
    stops = batch.paragraph_starts[1:].tolist() + [len(batch.data)]
    paragraphs = zip(batch.paragraph_starts.tolist(), stops, strict=True)
    for document_stop in batch.document_starts[1:].tolist():
        parts = []
        for start, stop in paragraphs:
            parts.append(batch.data[start + 1 : stop])
            if stop == document_stop:
                break
        yield b"\n\n".join(parts).decode()


def read_rows(job: Job, number: int, column: Literal["text", "dropped"]) -> Iterator[tuple[np.ndarray, list[bytes]]]:
    """Yield of each batch of a unit the ids (E,) uint64 of its encoded documents, and the lines of a kind."""
    with open_parts(rows_url(job.work_folder, job.units[number]), _KIND) as parts:
        for row in range(parts.num_rows):
            data = parts.read(row, _COLUMNS.index(column))
            lines = zstandard.ZstdDecompressor().decompress(data).splitlines(keepends=True) if len(data) else []
            yield np.frombuffer(parts.read(row, 0), "<u8"), lines


class KeptIds:
    """The ids of the documents of a group that deduplication keeps, by unit."""

    def __init__(self) -> None:
        self._ids: dict[int, list[np.ndarray]] = {}

    def add(self, number: int, selected: Section) -> None:
        """Add what is selected of a unit; a document without tokens is dropped."""
        self._ids.setdefault(number, []).append(selected.document_ids[selected.document_lengths > 0])

    def write(self, job: Job, group: int) -> None:
        url = _kept_url(job, group)
        with storage.local_write(url) as path, open(path, "wb") as file:
            parts = PartsWriter(file, _KEPT_KIND, 1)
            for number in range(len(job.units)):
                parts.add(b"".join(ids.astype("<u8").tobytes() for ids in self._ids.get(number, ())))
            parts.close({})


def kept_ids(job: Job, number: int, document_counts: np.ndarray) -> np.ndarray:
    """Return the ids (n,) uint64 of the documents of a unit that deduplication keeps, ascending.

    Args:
        document_counts: (num_sections,) of the unit in each group.
    """
    found = [np.empty(0, np.uint64)]
    for group in np.flatnonzero(document_counts).tolist():
        with open_parts(_kept_url(job, group), _KEPT_KIND) as parts:
            found.append(np.frombuffer(parts.read(number, 0), "<u8"))
    return np.sort(np.concatenate(found))


def _kept_url(job: Job, group: int) -> str:
    return storage.join(job.work_folder, f"kept-{group:06d}")


def _dropped_line(document: Document, drop: Drop) -> bytes:
    values = {"id": document.id, "url": document.url, "language": document.language, "metadata": document.metadata}
    record: dict[str, Any] = {"step": drop.step, "reason": drop.summary}
    record |= {"source": document.source, "text": document.text}
    record |= {name: value for name, value in values.items() if value}
    return (json.dumps(record, sort_keys=True) + "\n").encode()


def _packed(lines: Iterable[bytes]) -> bytes:
    data = b"".join(lines)
    return zstandard.ZstdCompressor(level=_COMPRESSION_LEVEL).compress(data) if data else b""
