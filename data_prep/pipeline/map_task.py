"""The map task: reads, cleans and encodes one input unit and sorts its documents by destination shard."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.base.errors import UserError
from data_prep.dataset.removed_names import REMOVED_EARLIER, ExcludedNames
from data_prep.deduplication.near_duplicates import signatures_url
from data_prep.deduplication.signature_files import SignatureWriter, open_signatures
from data_prep.documents.document import Document
from data_prep.documents.documents import DocumentLanguages
from data_prep.documents.drops import READING, TAKEDOWNS, Drop
from data_prep.documents.rejects import BadInput
from data_prep.pipeline.encoding import Early, RowWriter, encode_documents, rows_url
from data_prep.pipeline.job import Job
from data_prep.pipeline.sections import Section, SectionWriter
from data_prep.pipeline.units import Unit
from data_prep.storage import storage

# Both limits bound memory: for few long documents and for many short ones.
_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 1 << 14
INPUT_CHANGED = "input-changed"
"""The code of the error for an input that is not the file that the work was planned with."""


def sections_url(work_folder: str, unit_name: str) -> str:
    """Return the URL of the result of a unit."""
    return storage.join(work_folder, f"map-{unit_name}.sections")


def map_unit(job: Job, unit: Unit) -> int:
    """Write the unit's work file, whose existence marks the unit as done; return the bytes of processed input.

    The file of signatures for a search for near-duplicates, and that of rows for `Job.keeps`, are written first. If a
    part turns out to be damaged after some of its documents were used, the unit restarts without the part.
    """
    spoiled: dict[int, str] = {}
    while True:
        num_spoiled = len(spoiled)
        try:
            with storage.local_write(sections_url(job.work_folder, unit.name)) as path:
                _write(job, unit, path, spoiled)
                _check_stamps(unit)
            return unit.bytes
        except UserError:
            if len(spoiled) > num_spoiled:
                continue
            _check_stamps(unit)  # a file that changes may look damaged, or be gone
            raise


def _check_stamps(unit: Unit) -> None:
    """Check that the files of a unit still have the stamps by which its result is named.

    Raises:
        UserError: one has not.
    """
    for url, stamp in {part.url: part.stamp for part in unit.parts if part.stamp}.items():
        try:
            is_same = storage.stamp(url) == stamp
        except UserError:
            if storage.exists(url):
                raise
            is_same = False
        if not is_same:
            raise UserError(
                f"input {storage.redact(url)} changed while it was read",
                fix="run the same command again once it is complete: it reads this file again",
                code=INPUT_CHANGED,
            )


def _write(job: Job, unit: Unit, path: Path, spoiled: dict[int, str]) -> None:
    """Write the documents of all parts except the `spoiled` ones, whose reasons are counted.

    Raises:
        BadInput: the policy is `error`; or another part turns out to be spoiled, and `spoiled` has its reason now.
    """
    tokenizer, settings, filters = job.tokenizer(), job.reading.settings[unit.source], job.reading.filters(unit.source)
    dropped: Counter[Drop] = Counter()
    languages = DocumentLanguages()
    digests: list[str] = []
    cut_words = num_empty_files = 0
    with open(path, "wb") as file, _signature_writer(job, unit) as signatures, _row_writer(job, unit) as rows:
        writer = SectionWriter(file, job.destinations.num_sections, tokenizer.token_dtype)

        def add(batch: list[Document], early: Early) -> int:
            found = encode_documents(batch, tokenizer, settings, dropped, job.has_provenance)
            encoded = found.section
            if rows is not None:
                rows.add(batch, early, found)
            if len(encoded.document_ids):
                sources = np.full(len(encoded.document_ids), unit.source, np.uint16)
                encoded = dataclasses.replace(encoded, sources=sources)
                writer.add(encoded, job.destinations.groups_of(encoded.document_ids))
                if signatures is not None:
                    _sign(encoded, signatures)
            return found.num_cut_words

        excluded = job.excluded_names()
        batches = _Batches(add, excluded)
        on_drop = batches.drop if "dropped" in job.keeps else None
        for number, part in enumerate(unit.parts):
            if number in spoiled:
                dropped[Drop(READING, spoiled[number])] += 1
                digests.append(job.reading.sha256(part))
                continue
            reader = job.reading.reader(part)
            reader.is_quiet = number <= max(spoiled, default=-1)
            try:
                num_read = batches.read(filters.apply(reader, on_drop), part.name)
            except BadInput as error:
                if error.spoils_file and settings.on_bad_input == "skip":
                    spoiled[number] = error.reason
                raise
            dropped.update(reader.drops)
            if part.whole and not num_read and not reader.drops:
                num_empty_files += 1
            if part.format.has_fields:
                languages.merge(reader.languages)
            digests.append(reader.sha256)
        cut_words = batches.finish()
        if excluded is not None and excluded.dropped:
            dropped[Drop(TAKEDOWNS, REMOVED_EARLIER)] += excluded.dropped
        writer.close(
            {
                "source": unit.source,
                "dropped": [[*drop, count] for drop, count in sorted(dropped.items())],
                "parts": digests,
                "cut_words": cut_words,
                "empty_files": num_empty_files,
                "languages": dataclasses.asdict(languages),
            }
        )


def _signature_writer(job: Job, unit: Unit) -> Any:
    if not job.deduplication.near:
        return nullcontext()
    return open_signatures(signatures_url(job.work_folder, unit.name), job.deduplication)


@contextmanager
def _row_writer(job: Job, unit: Unit) -> Iterator[RowWriter | None]:
    if not job.keeps:
        yield None
        return
    with storage.local_write(rows_url(job.work_folder, unit.name)) as path, open(path, "wb") as file:
        writer = RowWriter(file, job, unit.source)
        yield writer
        writer.close()


def _sign(encoded: Section, writer: SignatureWriter) -> None:
    documents = np.split(encoded.tokens, np.cumsum(encoded.document_lengths, dtype=np.int64)[:-1])
    for identity, tokens in zip(encoded.document_ids.tolist(), documents, strict=True):
        writer.add(identity, tokens)


class _Batches:
    """Documents of many parts, encoded in batches, without those of names that a takedown listed."""

    def __init__(self, add: Callable[[list[Document], Early], int], excluded: ExcludedNames | None) -> None:
        self._add, self._excluded = add, excluded
        self._batch: list[Document] = []
        self._early: list[tuple[int, Document, Drop]] = []
        self._characters = 0
        self._cut_words = 0

    def read(self, documents: Iterator[Document], name: str) -> int:
        """Add the documents of a part of the file `name`; return their number."""
        num_read = 0
        for document in documents:
            num_read += 1
            if self._excluded is not None and self._excluded.excludes(document, name):
                continue
            self._batch.append(document)
            self._characters += len(document.text)
            if self._characters >= _BATCH_CHARACTERS or len(self._batch) >= _BATCH_DOCUMENTS:
                self._encode()
        return num_read

    def drop(self, document: Document, drop: Drop) -> None:
        """Take a document that a filter dropped, whose row follows those of the documents before it."""
        self._early.append((len(self._batch), document, drop))
        self._characters += len(document.text)
        if self._characters >= _BATCH_CHARACTERS or len(self._early) >= _BATCH_DOCUMENTS:
            self._encode()

    def finish(self) -> int:
        """Encode the rest; return how many words were encoded in parts."""
        if self._batch or self._early:
            self._encode()
        return self._cut_words

    def _encode(self) -> None:
        self._cut_words += self._add(self._batch, self._early)
        self._batch, self._early, self._characters = [], [], 0
