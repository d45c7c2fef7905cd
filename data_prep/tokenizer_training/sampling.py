"""Sampling of one input unit of a corpus.

The documents of a unit pass through a file, a line of JSON and the text each, so that neither the worker nor the
transfer holds texts in memory.

Filters judge only the documents that may be in the sample or held out: those are chosen by the hashes of their texts
before filters. With `sampling_alpha` below 1 they judge all, because the shares of the groups are those of what stays.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from data_prep.base.errors import UsageError, UserError
from data_prep.config.preparation_config import DocumentSettings
from data_prep.documents.document import Document
from data_prep.documents.documents import DocumentReader
from data_prep.documents.drops import CLEANING, READING, Drop
from data_prep.documents.input_files import InputUnit
from data_prep.documents.rejects import BadInput
from data_prep.filters.chain import FilterChain, SourceReading
from data_prep.text.cleaning import Normalization
from data_prep.text.sentences import check_language
from data_prep.text.text_batch import batches, normalize_batch
from data_prep.tokenizer.tokenizer_info import TokenizerSettings
from data_prep.tokenizer_training.training_sample import EVEN, Choice, HeldOut, HeldOutDocument, hash_of, key_of

UNKNOWN_LANGUAGE = "unknown"
LIMIT_NAME = "limit"
CHOSEN, HELD_OUT, JUDGED = "chosen", "held out", "judged"
"""Kinds of what a unit writes."""

# Both bound memory: few long documents, or very many short ones.
_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 1 << 14


@dataclass(frozen=True)
class SampleJob:
    """What all units of a sample share."""

    reading: SourceReading
    settings: TokenizerSettings
    work_folder: str
    """Local; where the units' documents are written to, and where `LIMIT_NAME` may say how few are still needed."""
    multipliers: dict[str, int] | None = None
    """As `tempering` gives them, by source or language; None where all are alike."""

    def multiplier(self, source: str, language: str) -> int:
        """Return the multiplier of the group of a document; a group that was not counted has damaged files only."""
        by_language = self.settings.sampling_by == "language"
        return EVEN if self.multipliers is None else self.multipliers.get(language if by_language else source, EVEN)

    def is_lazy(self, source: int) -> bool:
        """Return whether the documents of a source are chosen before its filters judge them."""
        return self.settings.sampling_alpha == 1 and bool(self.reading.settings[source].filters)


class SampleUnit(NamedTuple):
    """Input unit to sample from."""

    number: int
    part: InputUnit


@dataclass
class CorpusCounts:
    """What was read: documents and bytes of text by (source, language); what was left out by (source, step, reason).

    Attributes:
        is_before_filters: filters judged only the documents that the sample needed: `documents` and `text_bytes` are of
            all that was read, and what filters and the limits of length left out is counted among the judged ones.
    """

    documents: Counter[tuple[str, str]] = field(default_factory=Counter)
    text_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    dropped: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    warnings: list[str] = field(default_factory=list)
    is_before_filters: bool = False

    def add(self, other: CorpusCounts) -> None:
        self.documents.update(other.documents)
        self.text_bytes.update(other.text_bytes)
        self.dropped.update(other.dropped)
        self.warnings.extend(other.warnings)

    def bytes_by(self, kind: str) -> Counter[str]:
        """Bytes of text by "source" or by "language"."""
        counts: Counter[str] = Counter()
        for key, num_bytes in self.text_bytes.items():
            counts[key[("source", "language").index(kind)]] += num_bytes
        return counts


class Judged(NamedTuple):
    """A document that filters dropped or changed: its language and bytes before, and why it was dropped or both after.

    Attributes:
        rank: as that of `HeldOutDocument`.
        step: that dropped it; like the reason empty for one that stays.
    """

    rank: int
    source: str
    language: str
    num_bytes: int
    step: str
    reason: str
    language_after: str
    bytes_after: int

    def is_needed(self, limit: int | None) -> bool:
        """Return whether the document is below the limit of the sample."""
        return limit is None or key_of(0, EVEN, self.rank) < limit

    def add_to(self, counts: CorpusCounts, has_all: bool) -> None:
        """Count it; with `has_all`, which says that filters judged all documents, take it from those that were read."""
        if self.reason:
            counts.dropped[self.source, self.step, self.reason] += 1
        if has_all:
            counts.documents[self.source, self.language] -= 1
            counts.text_bytes[self.source, self.language] -= self.num_bytes
            if not self.reason:
                counts.documents[self.source, self.language_after] += 1
                counts.text_bytes[self.source, self.language_after] += self.bytes_after


class Limits(NamedTuple):
    """What is known of the documents that are not needed, from the units so far.

    Attributes:
        sample: as `Choice.limit`.
        held_out: as `HeldOut.floors`.
    """

    sample: int | None
    held_out: dict[str, int]

    @classmethod
    def known(cls, work_folder: str) -> Limits:
        """Read what was known when a unit was begun."""
        try:
            return cls(*json.loads((Path(work_folder) / LIMIT_NAME).read_bytes()))
        except FileNotFoundError:
            return cls(None, {})


def count_unit(job: SampleJob, unit: SampleUnit) -> CorpusCounts:
    """Count the unit's documents and bytes; nothing of a file that turns out damaged."""
    return _read(job, unit)


def sample_unit(job: SampleJob, unit: SampleUnit) -> tuple[CorpusCounts, str]:
    """Write the unit's sample and held-out documents to a file of the work folder; returns the counts and its path.

    The file holds at least what of the unit is in the sample of the corpus; nothing where it turns out damaged.
    """
    # A unit may be done twice at once, where a killed pool's other workers take a moment to end.
    path = Path(job.work_folder) / f"unit-{unit.number:06d}-{uuid.uuid4().hex}"
    with writing(path), open(path, "wb") as file:
        counts = _read(job, unit, _Writer(job, unit.part.source, file))
        if counts.warnings:
            file.seek(0)
            file.truncate()
    return counts, str(path)


class _Writer:
    """Writes the documents that may be in the sample, and at the end those that are held out."""

    def __init__(self, job: SampleJob, source: int, file: BinaryIO) -> None:
        self._job, self._file = job, file
        self._source, self._settings = job.reading.names[source], job.reading.settings[source]
        known = Limits.known(job.work_folder)
        self._choice = Choice(job.settings.sample_bytes, known.sample)
        self._held_out = HeldOut(floors=known.held_out)

    def add(self, language: str, text: str, rank: int | None = None) -> None:
        """Offer a cleaned text; of a held-out one the beginning is written whenever it becomes one."""
        job = self._job
        document_hash = hash_of(text, job.settings.seed)
        rank = document_hash if rank is None else rank
        multiplier = job.multiplier(self._source, language)
        key = key_of(document_hash, multiplier, rank)
        taken, _ = self._choice.offer(document_hash, key, min(_num_bytes(text), job.settings.sample_bytes))
        if taken:
            self._write(CHOSEN, (rank, document_hash, self._source, language), text)
        kept = self._held_out.add(HeldOutDocument(rank, document_hash, self._source, language, text))
        if kept is not None:
            self._write(HELD_OUT, (rank, document_hash, self._source, language), kept.text)

    def judge(
        self, document: Document, language: str, cleaned: str, reader: DocumentReader, chain: FilterChain
    ) -> None:
        """Let the filters judge a document that may be in the sample or held out, where all groups are alike.

        What stays is added. Where the filters dropped or changed the document, `Judged` is written.
        """
        rank, limit = hash_of(cleaned, self._job.settings.seed), self._choice.limit
        if limit is not None and key_of(0, EVEN, rank) >= limit and not self._held_out.may_hold(self._source, rank):
            return
        kept, drop = chain.judge(document, reader)
        final, language_after = cleaned, language_label(kept.language or self._settings.language)
        if drop is None:
            if kept.text is not document.text:
                (final,) = _cleaned([kept.text], self._job.settings.normalization)
            drop = _why_dropped(final, self._settings)
        if drop is None:
            self.add(language_after, final, rank)
        before, after = (language, _num_bytes(cleaned)), (language_after, _num_bytes(final))
        if drop is not None or before != after:
            judged = Judged(rank, self._source, *before, *(drop or ("", "")), *after)
            if judged.is_needed(self._choice.limit):
                self._write(JUDGED, judged, "")

    def _write(self, kind: str, values: Sequence[Any], text: str) -> None:
        data = text.encode()
        self._file.write(b"%s\n%s" % (json.dumps([kind, values, len(data)]).encode(), data))


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error of the disk into a `UserError`."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror} (the sample needs about tokenizer.sample_bytes per worker)",
            fix="free space there, or choose another output",
            code="unwritable-file",
        ) from None


def written_documents(path: str) -> Iterator[tuple[str, list[Any], str]]:
    """Yield what a unit wrote: kind, values, text."""
    with open(path, "rb") as file:
        while head := file.readline():
            kind, values, num_bytes = json.loads(head)
            yield kind, values, file.read(num_bytes).decode()


def _read(job: SampleJob, unit: SampleUnit, writer: _Writer | None = None) -> CorpusCounts:
    """Count the documents of the unit and offer them to the writer, all or those that the sample needs.

    In the second case (`SampleJob.is_lazy`) all documents are counted before filters, and `Judged` corrects the counts.
    """
    counts, number = CorpusCounts(), unit.part.source
    settings, source, reader = job.reading.settings[number], job.reading.names[number], job.reading.reader(unit.part)
    is_lazy, chain = job.is_lazy(number), job.reading.filters(number)
    try:
        read = ((document, reader.rejects.position) for document in (reader if is_lazy else chain.apply(reader)))
        for batch in batches(read, lambda each: len(each[0].text), _BATCH_CHARACTERS, _BATCH_DOCUMENTS):
            texts = _cleaned([document.text for document, _ in batch], job.settings.normalization)
            for (document, position), cleaned in zip(batch, texts, strict=True):
                language = language_label(document.language or settings.language)
                if not is_lazy and (drop := _why_dropped(cleaned, settings)) is not None:
                    counts.dropped[source, *drop] += 1
                    continue
                counts.documents[source, language] += 1
                counts.text_bytes[source, language] += _num_bytes(cleaned)
                if is_lazy and writer is not None:
                    reader.rejects.position = position  # which errors of filters name
                    writer.judge(document, language, cleaned, reader, chain)
                elif writer is not None:
                    writer.add(language, cleaned)
    except BadInput as error:
        if settings.on_bad_input == "error":
            raise
        return CorpusCounts(dropped=Counter({(source, READING, error.reason): 1}), warnings=[str(error)])
    drops = reader.drops - reader.filtered if is_lazy else reader.drops
    counts.dropped.update({(source, *drop): count for drop, count in drops.items()})
    return counts


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _cleaned(texts: Sequence[str], normalization: Normalization) -> Iterator[str]:
    """Yield each text normalized, one paragraph a line."""
    batch = normalize_batch(texts, normalization)
    lines = bytearray(batch.data)
    np.frombuffer(lines, np.uint8)[batch.paragraph_starts] = ord("\n")
    for start, stop in itertools.pairwise(batch.document_starts.tolist()):
        yield lines[start + 1 : stop].decode()


def _why_dropped(cleaned: str, settings: DocumentSettings) -> Drop | None:
    if not cleaned:
        return Drop(CLEANING, "empty")
    if len(cleaned) < settings.min_document_characters:
        return Drop(CLEANING, "too short")
    if settings.max_document_characters is not None and len(cleaned) > settings.max_document_characters:
        return Drop(CLEANING, "too long")
    return None


@functools.lru_cache(maxsize=4096)
def language_label(language: str) -> str:
    """The code without its region, such as en of en-GB; "unknown" for what is not a language."""
    code = re.split("[-_]", language.strip().lower(), maxsplit=1)[0]
    try:
        check_language(code)
    except UsageError:
        return UNKNOWN_LANGUAGE
    return code
