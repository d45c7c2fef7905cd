"""Rows of a unit: its documents as lines of JSON in a work file, written while the unit is encoded.

Those that filters and cleaning drop, with their reasons, and the texts of the others, with the ids by which
deduplication decides about them. `document_folders` makes files for users of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO, Literal

import numpy as np
import zstandard

from data_prep.documents.document import DOCUMENT_ID, Document
from data_prep.pipeline.encoding import EncodedDocuments
from data_prep.pipeline.job import Job
from data_prep.pipeline.sections import Section
from data_prep.storage import storage
from data_prep.storage.work_files import PartsWriter, open_parts
from data_prep.text.cleaning import replace_surrogates
from data_prep.text.text_batch import TextBatch

Early = Sequence[tuple[int, Document, str]]
"""Documents that filters dropped: how many documents of the batch precede each, the document, and the reason."""

_KIND = b"clozerw1"
_COLUMNS = ("ids", "text", "dropped")  # of the parts of a batch; the lines are compressed
_KEPT_KIND = b"clozekp1"
_COMPRESSION_LEVEL = 1  # of files that are read once


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
        dropped: list[tuple[int, Document, str]] = []
        if "dropped" in self._keeps:
            judged = zip(documents, encoded.reasons(), strict=True)
            late = [(number, document, reason) for number, (document, reason) in enumerate(judged) if reason]
            dropped = sorted([*early, *late], key=lambda each: each[0])  # stable: a filter's come before the document
        ids, texts = encoded.section.document_ids, list[bytes]()
        if "text" in self._keeps:
            kept = [each for each, reason in zip(documents, encoded.reasons(), strict=True) if reason is None]
            cleaned = (each.text for each in kept) if self._is_foreign else cleaned_texts(encoded.texts)
            texts = [self._text_line(*each) for each in zip(kept, cleaned, ids.tolist(), strict=True)]
        self._parts.add(ids.astype("<u8").tobytes())
        self._parts.add(_packed(texts))
        self._parts.add(_packed(_dropped_line(document, reason) for _, document, reason in dropped))

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

    Raises:
        UserError: the file of a group is missing or damaged.
    """
    found = [np.empty(0, np.uint64)]
    for group in np.flatnonzero(document_counts).tolist():
        with open_parts(_kept_url(job, group), _KEPT_KIND) as parts:
            found.append(np.frombuffer(parts.read(number, 0), "<u8"))
    return np.sort(np.concatenate(found))


def _kept_url(job: Job, group: int) -> str:
    return storage.join(job.work_folder, f"kept-{group:06d}")


def _dropped_line(document: Document, reason: str) -> bytes:
    values = {"id": document.id, "url": document.url, "language": document.language, "metadata": document.metadata}
    record: dict[str, Any] = {"reason": reason, "source": document.source, "text": document.text}
    record |= {name: value for name, value in values.items() if value}
    return (json.dumps(record, sort_keys=True) + "\n").encode()


def _packed(lines: Iterable[bytes]) -> bytes:
    data = b"".join(lines)
    return zstandard.ZstdCompressor(level=_COMPRESSION_LEVEL).compress(data) if data else b""
