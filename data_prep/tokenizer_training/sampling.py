"""Sampling of a corpus over all cores: each input unit draws a sample, and the samples are merged.

The documents of a unit pass through a file, a line of JSON and the text each, so that neither the worker nor the
transfer holds texts in memory. The result depends only on texts, settings and seed, not on the units and their order.

Filters judge only the documents that may be in the sample or held out: those are chosen by the hashes of their texts
before filters. With `sampling_alpha` below 1 they judge all, because the shares of the groups are those of what stays.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np

from data_prep.base.errors import UsageError, UserError
from data_prep.base.logs import logger
from data_prep.base.progress import Progress
from data_prep.config.preparation_config import DocumentSettings, PreparationConfig
from data_prep.documents.input_units import InputUnit
from data_prep.documents.rejects import BadInput
from data_prep.executors.executors import Executor, num_processes, run_units, shared
from data_prep.filters.chain import SourceReading, filter_identities
from data_prep.storage import storage
from data_prep.text.cleaning import Normalization
from data_prep.text.sentences import check_language
from data_prep.text.text_batch import batches, normalize_batch
from data_prep.tokenizer.tokenizer_info import TokenizerSettings
from data_prep.tokenizer_training.training_sample import (
    EVEN,
    Choice,
    HeldOut,
    HeldOutDocument,
    TrainingSample,
    hash_of,
    key_of,
    tempering,
)

UNKNOWN_LANGUAGE = "unknown"
LIMIT_NAME = "limit"

# Both bound memory: few long documents, or very many short ones.
_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 1 << 14

_CHOSEN, _HELD_OUT, _JUDGED = "chosen", "held out", "judged"
_MOST_FLOORS = 1_000  # sources whose floors workers read

Result = TypeVar("Result")


@dataclass(frozen=True)
class SampleJob:
    """What all units of a sample share."""

    reading: SourceReading
    settings: TokenizerSettings
    work_folder: str
    """Local; where the units' documents are written to, and where `LIMIT_NAME` may say how few are still needed."""
    multipliers: dict[str, int] | None = None
    """As `tempering` gives them, by source or language; None where all are alike."""

    def is_lazy(self, source: int) -> bool:
        """Return whether the documents of a source are chosen before its filters judge them."""
        return self.settings.sampling_alpha == 1 and bool(self.reading.settings[source].filters)


class SampleUnit(NamedTuple):
    """Input unit to sample from."""

    number: int
    part: InputUnit


@dataclass
class CorpusCounts:
    """What was read: documents and bytes of text by (source, language), and what was left out by (source, reason).

    Attributes:
        is_before_filters: filters judged only the documents that the sample needed: `documents` and `text_bytes` are of
            all that was read, and what filters and the limits of length left out is counted among the judged ones.
    """

    documents: Counter[tuple[str, str]] = field(default_factory=Counter)
    text_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    dropped: Counter[tuple[str, str]] = field(default_factory=Counter)
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
        reason: empty for one that stays.
    """

    rank: int
    source: str
    language: str
    num_bytes: int
    reason: str
    language_after: str
    bytes_after: int

    def is_needed(self, limit: int | None) -> bool:
        """Return whether the document is below the limit of the sample."""
        return limit is None or key_of(0, EVEN, self.rank) < limit

    def add_to(self, counts: CorpusCounts, has_all: bool) -> None:
        """Count it; with `has_all`, which says that filters judged all documents, take it from those that were read."""
        if self.reason:
            counts.dropped[self.source, self.reason] += 1
        if has_all:
            counts.documents[self.source, self.language] -= 1
            counts.text_bytes[self.source, self.language] -= self.num_bytes
            if not self.reason:
                counts.documents[self.source, self.language_after] += 1
                counts.text_bytes[self.source, self.language_after] += self.bytes_after


def draw_sample(
    config: PreparationConfig, units: Sequence[InputUnit], work_folder: str | Path, executor: Executor | int
) -> tuple[TrainingSample, CorpusCounts]:
    """Read all units; return the sample that `config.tokenizer` asks for, and what the corpus is made of.

    With `sampling_alpha` below 1 everything is read twice: first to learn the shares. `work_folder` is local, emptied
    first and removed at the end.
    """
    work = Path(work_folder)
    shutil.rmtree(work, ignore_errors=True)
    settings = config.tokenizer
    parts, multipliers = [SampleUnit(*each) for each in enumerate(units)], None
    job = SampleJob(SourceReading.of(config, filter_identities(config), {}), settings, str(work))
    if settings.sampling_alpha < 1:
        shares = CorpusCounts()
        for counts in _run("counting", count_unit, job, parts, executor):
            shares.add(counts)
        multipliers = tempering(shares.bytes_by(settings.sampling_by), settings.sampling_alpha)
        job = replace(job, multipliers=multipliers)
    sample, totals = TrainingSample(settings.sample_bytes, settings.seed), CorpusCounts()
    judged, written = list[Judged](), _Limits(None, {})
    is_lazy = any(map(job.is_lazy, range(len(job.reading.settings))))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        with _writing(work):
            work.mkdir(parents=True)
        for counts, path in _run("sampling", sample_unit, job, parts, executor):
            totals.add(counts)
            for warning in counts.warnings:
                logger(__name__).warning(warning)
            for kind, values, text in _documents(path):
                if kind == _JUDGED:
                    judged.append(Judged(*values))
                    continue
                rank, document_hash, source, language = values
                if kind == _HELD_OUT:
                    document = HeldOutDocument(rank, document_hash, source, language, text)
                    sample.held_out_documents.add(document)
                else:
                    multiplier = _multiplier(multipliers, settings.sampling_by, source, language)
                    sample.add_text(document_hash, source, language, text, multiplier, rank)
            os.remove(path)
            judged = [each for each in judged if each.is_needed(sample.choice.limit)]
            limits = _Limits.of(sample)
            if limits != written:
                storage.write_bytes(work / LIMIT_NAME, json.dumps(limits).encode())
                written = limits
    totals.is_before_filters = is_lazy and sample.choice.limit is not None
    for each in judged:
        each.add_to(totals, has_all=not totals.is_before_filters)
    totals.documents, totals.text_bytes = +totals.documents, +totals.text_bytes
    return sample, totals


def count_unit(job: SampleJob, unit: SampleUnit) -> CorpusCounts:
    """Count the unit's documents and bytes; nothing of a file that turns out damaged."""
    return _read(job, unit, lambda language, text: None)


def sample_unit(job: SampleJob, unit: SampleUnit) -> tuple[CorpusCounts, str]:
    """Write the unit's sample and held-out documents to a file of the work folder; returns the counts and its path.

    The file holds at least what of the unit is in the sample of the corpus; nothing where it turns out damaged.
    """
    # A unit may be done twice at once, where a killed pool's other workers take a moment to end.
    path = Path(job.work_folder) / f"unit-{unit.number:06d}-{uuid.uuid4().hex}"
    with _writing(path), open(path, "wb") as file:
        writer = _Writer(job, job.reading.names[unit.part.source], file)
        counts = _read_lazily(job, unit, writer) if job.is_lazy(unit.part.source) else _read(job, unit, writer.add)
        if counts.warnings:
            file.seek(0)
            file.truncate()
    return counts, str(path)


class _Writer:
    """Writes the documents that may be in the sample, and at the end those that are held out."""

    def __init__(self, job: SampleJob, source: str, file: BinaryIO) -> None:
        self._job, self._source, self._file = job, source, file
        known = _Limits.known(job.work_folder)
        self._choice = Choice(job.settings.sample_bytes, known.sample)
        self._held_out = HeldOut(floors=known.held_out)

    def needs(self, rank: int) -> bool:
        """Return whether a document with this rank may be in the sample or held out, where all groups are alike."""
        limit = self._choice.limit
        return limit is None or key_of(0, EVEN, rank) < limit or self._held_out.may_hold(self._source, rank)

    def add(self, language: str, text: str, rank: int | None = None) -> None:
        """Offer a cleaned text; of a held-out one the beginning is written whenever it becomes one."""
        job = self._job
        document_hash = hash_of(text, job.settings.seed)
        rank = document_hash if rank is None else rank
        multiplier = _multiplier(job.multipliers, job.settings.sampling_by, self._source, language)
        key = key_of(document_hash, multiplier, rank)
        taken, _ = self._choice.offer(document_hash, key, min(_num_bytes(text), job.settings.sample_bytes))
        if taken:
            self._write(_CHOSEN, (rank, document_hash, self._source, language), text)
        kept = self._held_out.add(HeldOutDocument(rank, document_hash, self._source, language, text))
        if kept is not None:
            self._write(_HELD_OUT, (rank, document_hash, self._source, language), kept.text)

    def add_judged(self, judged: Judged) -> None:
        """Write what filters did to a document."""
        if judged.is_needed(self._choice.limit):
            self._write(_JUDGED, judged, "")

    def _write(self, kind: str, values: Sequence[Any], text: str) -> None:
        data = text.encode()
        self._file.write(b"%s\n%s" % (json.dumps([kind, values, len(data)]).encode(), data))


def _run(
    title: str,
    function: Callable[[SampleJob, SampleUnit], Result],
    job: SampleJob,
    units: Sequence[SampleUnit],
    executor: Executor | int,
) -> Iterator[Result]:
    total, processes = sum(unit.part.bytes for unit in units), num_processes(executor, len(units))
    with Progress(title, total, "MB", 1e6, num_tasks=len(units), num_processes=processes) as progress:
        for unit, result in run_units(shared(function, job), units, executor):
            yield result
            progress.add(unit.part.bytes)


class _Limits(NamedTuple):
    """What is known of the documents that are not needed, from the units so far.

    Attributes:
        sample: as `Choice.limit`.
        held_out: as `HeldOut.floors`.
    """

    sample: int | None
    held_out: dict[str, int]

    @classmethod
    def of(cls, sample: TrainingSample) -> _Limits:
        floors = sample.held_out_documents.floors()
        return cls(sample.choice.limit, floors if len(floors) <= _MOST_FLOORS else {})

    @classmethod
    def known(cls, work_folder: str) -> _Limits:
        """Read what was known when a unit was begun."""
        try:
            return cls(*json.loads((Path(work_folder) / LIMIT_NAME).read_bytes()))
        except FileNotFoundError:
            return cls(None, {})


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror} (the sample needs about tokenizer.sample_bytes per worker)",
            fix="free space there, or choose another output",
            code="unwritable-file",
        ) from None


def _documents(path: str) -> Iterator[tuple[str, list[Any], str]]:
    """What a unit wrote: kind, values, text."""
    with open(path, "rb") as file:
        while head := file.readline():
            kind, values, num_bytes = json.loads(head)
            yield kind, values, file.read(num_bytes).decode()


def _multiplier(multipliers: dict[str, int] | None, sampling_by: str, source: str, language: str) -> int:
    # A group that was not counted stands in damaged files alone, and of these nothing is kept.
    return EVEN if multipliers is None else multipliers.get(language if sampling_by == "language" else source, EVEN)


def _read(job: SampleJob, unit: SampleUnit, take: Callable[[str, str], None]) -> CorpusCounts:
    """Give every cleaned document of the unit, with its language, to `take`, and count."""
    counts, number = CorpusCounts(), unit.part.source
    settings, source, reader = job.reading.settings[number], job.reading.names[number], job.reading.reader(unit.part)
    documents = job.reading.filters(number).apply(reader)
    try:
        for batch in batches(documents, lambda document: len(document.text), _BATCH_CHARACTERS, _BATCH_DOCUMENTS):
            texts = _cleaned([document.text for document in batch], job.settings.normalization)
            for document, cleaned in zip(batch, texts, strict=True):
                language = language_label(document.language or settings.language)
                reason = _why_dropped(cleaned, settings)
                if reason is not None:
                    counts.dropped[source, reason] += 1
                    continue
                counts.documents[source, language] += 1
                counts.text_bytes[source, language] += _num_bytes(cleaned)
                take(language, cleaned)
    except BadInput as error:
        if settings.on_bad_input == "error":
            raise
        return CorpusCounts(dropped=Counter({(source, error.reason): 1}), warnings=[str(error)])
    counts.dropped.update({(source, reason): count for reason, count in reader.dropped.items()})
    return counts


def _read_lazily(job: SampleJob, unit: SampleUnit, writer: _Writer) -> CorpusCounts:
    """Give the documents of the unit that the sample needs to the writer, once filters have judged them.

    All documents are counted, and `Judged` corrects the counts.
    """
    counts, number = CorpusCounts(), unit.part.source
    settings, source, reader = job.reading.settings[number], job.reading.names[number], job.reading.reader(unit.part)
    chain, normalization = job.reading.filters(number), job.settings.normalization
    try:
        read = ((document, reader.position) for document in reader)
        for batch in batches(read, lambda each: len(each[0].text), _BATCH_CHARACTERS, _BATCH_DOCUMENTS):
            texts = _cleaned([document.text for document, _ in batch], normalization)
            for (document, position), cleaned in zip(batch, texts, strict=True):
                language, num_bytes = language_label(document.language or settings.language), _num_bytes(cleaned)
                counts.documents[source, language] += 1
                counts.text_bytes[source, language] += num_bytes
                rank = hash_of(cleaned, job.settings.seed)
                if not writer.needs(rank):
                    continue
                reader.position = position  # which errors of filters name
                kept, reason = chain.judge(document, reader)
                final, language_after = cleaned, language_label(kept.language or settings.language)
                if reason is None:
                    if kept.text is not document.text:
                        (final,) = _cleaned([kept.text], normalization)
                    reason = _why_dropped(final, settings)
                if reason is None:
                    writer.add(language_after, final, rank)
                after = (language_after, _num_bytes(final))
                if reason is not None or (language, num_bytes) != after:
                    writer.add_judged(Judged(rank, source, language, num_bytes, reason or "", *after))
    except BadInput as error:
        if settings.on_bad_input == "error":
            raise
        return CorpusCounts(dropped=Counter({(source, error.reason): 1}), warnings=[str(error)])
    left_out = reader.dropped - reader.filtered
    counts.dropped.update({(source, reason): count for reason, count in left_out.items()})
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


def _why_dropped(cleaned: str, settings: DocumentSettings) -> str | None:
    if not cleaned:
        return "empty"
    if len(cleaned) < settings.min_document_characters:
        return "too short"
    if settings.max_document_characters is not None and len(cleaned) > settings.max_document_characters:
        return "too long"
    return None


@functools.lru_cache(maxsize=4096)
def language_label(language: str) -> str:
    """The code without its region, such as en of en-GB; "unknown" for what is no language."""
    code = re.split("[-_]", language.strip().lower(), maxsplit=1)[0]
    try:
        check_language(code)
    except UsageError:
        return UNKNOWN_LANGUAGE
    return code
