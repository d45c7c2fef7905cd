"""The sample of an estimate: the beginnings of units, read, encoded, and written as shards; every step is timed."""

from __future__ import annotations

import dataclasses
import io
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO

import numpy as np

from data_prep.config.preparation_config import DocumentSettings, PreparationConfig
from data_prep.dataset.counts import SOURCE_COLUMNS
from data_prep.dataset.shards import shard_name
from data_prep.documents.document import Document
from data_prep.documents.input_units import InputUnit, file_format, has_fields, is_one_document
from data_prep.documents.lines import Line, blank_line_blocks, bounded_lines, skip_to_line
from data_prep.documents.rejects import BadInput
from data_prep.filters.filtered_reader import FilteredReader
from data_prep.pipeline.destinations import Destinations
from data_prep.pipeline.encoding import encode_documents
from data_prep.pipeline.map_task import sections_url
from data_prep.pipeline.reduce_phase import dtype_name
from data_prep.pipeline.reduce_task import ReduceTask, read_result, reduce_shard, result_url
from data_prep.pipeline.sections import Section, SectionWriter, join_sections
from data_prep.storage import storage
from data_prep.storage.compression import decompress
from data_prep.text.text_batch import batches
from data_prep.tokenizer.tokenizer import Tokenizer

_GROWTH_BYTES = 4_000_000  # of text by which compression is judged
_PIECE_BYTES = 1 << 14
_LINES = (".txt", ".jsonl", ".json")  # whose documents are counted line by line; of others buffers are counted
_BATCH_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class Sample:
    """What was read of a unit; `read_bytes` is its share of the `bytes` of the unit."""

    unit: InputUnit
    encoded: Section
    read_bytes: float
    is_all: bool
    dropped: int
    seconds: float


def sample_unit(
    unit: InputUnit, config: PreparationConfig, tokenizer: Tokenizer, most_characters: int, fingerprint: str
) -> Sample:
    """Read and encode the unit's first documents, of about `most_characters` in all.

    Args:
        fingerprint: of the plan's filters.
    """
    settings, source = config.documents, config.sources[unit.source]
    language = source.language or settings.language
    reader = FilteredReader(unit, settings, source.name, source.text_field, fingerprint)
    dropped: Counter[str] = Counter()
    parts: list[Section] = []
    num_documents = 0
    has_rows = settings.has_provenance_fields or not has_fields(unit.url, unit.format)
    started_at = time.perf_counter()
    try:
        first = _first(reader, most_characters)
        for batch in batches(first, lambda document: len(document.text), _BATCH_CHARACTERS):
            num_documents += len(batch)
            parts.append(encode_documents(batch, tokenizer, settings, language, dropped, has_rows)[0])
    except BadInput as error:
        if settings.on_bad_input == "error" or not error.spoils_file:
            raise
        nothing, _ = encode_documents([], tokenizer, settings, language, dropped)
        return Sample(unit, nothing, unit.bytes, True, 1, time.perf_counter() - started_at)
    num_read = num_documents + sum(reader.dropped.values())
    parts.append(encode_documents([], tokenizer, settings, language, dropped)[0])
    seconds = time.perf_counter() - started_at
    is_all = bool(reader.sha256)
    read_bytes = unit.bytes if is_all else min(unit.bytes, _bytes_of(unit, num_read, reader, settings))
    num_dropped = sum(dropped.values()) + sum(reader.dropped.values())
    return Sample(unit, join_sections(parts), read_bytes, is_all, num_dropped, seconds)


def _first(reader: FilteredReader, most_characters: int) -> Iterator[Document]:
    """Yield the first documents; one more is read, so that the end of the unit is noticed."""
    num_characters = 0
    for document in reader:
        if num_characters >= most_characters:
            break
        yield document
        num_characters += len(document.text)


def _bytes_of(unit: InputUnit, num_documents: int, reader: FilteredReader, settings: DocumentSettings) -> float:
    """About how many bytes of its file the unit's first documents take."""
    if reader.num_rows is not None:
        return unit.bytes * num_documents / max(reader.num_rows, 1)
    ending, compression = file_format(unit.url, unit.format)
    if is_one_document(ending, settings):
        return unit.bytes
    if ending not in _LINES:
        return reader.bytes_read
    with storage.open_read(unit.url) as raw:
        raw.seek(max(0, unit.start - 1))
        counted = _CountedFile(raw)
        stream = decompress(counted, compression)
        start = skip_to_line(stream, unit.start - 1, unit.stop) if unit.start else 0
        lines = bounded_lines(stream, settings.max_document_bytes, start)
        if ending == ".txt":
            found: Iterator[Line] = blank_line_blocks(lines, settings.max_document_bytes, unit.start == 0, None)
        else:
            found = (line for line in lines if line.num_bytes > settings.max_document_bytes or line.data.strip())
        last = deque(islice(found, num_documents), maxlen=1)
        plain_bytes = last[0].start + last[0].num_bytes + 1 - start if last else 0
        if not compression:
            return plain_bytes
        done = plain_bytes + len(stream.read(max(0, _GROWTH_BYTES - plain_bytes)))
        return plain_bytes * counted.num_bytes / max(done, 1)


class _CountedFile(io.RawIOBase):
    """A file that is read in small pieces and counts them, to learn how far a decompressor has read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.num_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(min(len(buffer), _PIECE_BYTES))
        buffer[: len(data)] = data
        self.num_bytes += len(data)
        return len(data)


@dataclass(frozen=True)
class WrittenSample:
    """The shards of the sample.

    Attributes:
        counts: (num_units, 5) of what is in them, in the order of `SOURCE_COLUMNS`.
        copies: (num_units,) documents that are not, since others have the same text.
        largest_seconds: for the largest shard, and for all work files.
        smallest_seconds: for the smallest shard, of nearly nothing.
        seconds: for everything.
    """

    counts: np.ndarray
    copies: np.ndarray
    shard_bytes: int
    largest_seconds: float
    smallest_seconds: float
    seconds: float


def write_sample(
    samples: Sequence[Sample], planned: Destinations, config: PreparationConfig, tokenizer: Tokenizer
) -> WrittenSample:
    """Make shards of the sample in a folder of its own, each unit's documents as a source of their own."""
    counts = np.zeros((len(samples), len(SOURCE_COLUMNS)), np.int64)
    copies = np.zeros(len(samples), np.int64)
    shard_bytes, shard_seconds = 0, []
    with tempfile.TemporaryDirectory(prefix="clozeworks-") as folder:
        started_at = time.perf_counter()
        present = np.zeros(len(planned), bool)
        for number, sample in enumerate(samples):
            destinations = planned.of_many(sample.encoded.document_ids)
            present[destinations] = True
            with open(sections_url(folder, number), "wb") as file:
                writer = SectionWriter(file, len(planned), tokenizer.token_dtype)
                sources = np.full(len(destinations), number, np.uint16)
                writer.add(dataclasses.replace(sample.encoded, sources=sources), destinations)
                writer.close({})
        section_seconds = time.perf_counter() - started_at
        for destination in np.flatnonzero(present).tolist():
            started_at = time.perf_counter()
            task = _reduce_task(destination, planned, len(samples), config, tokenizer, folder)
            reduce_shard(task)
            result = read_result(result_url(task))
            shard_seconds.append(time.perf_counter() - started_at)
            counts += result.source_counts
            for number, _, count in result.dropped:
                copies[number] += count
            shard_bytes += result.shard.bytes + result.shard.index.bytes
    return WrittenSample(
        counts=counts,
        copies=copies,
        shard_bytes=shard_bytes,
        largest_seconds=section_seconds + max(shard_seconds, default=0.0),
        smallest_seconds=min(shard_seconds, default=0.0) if len(shard_seconds) > 1 else 0.0,
        seconds=section_seconds + sum(shard_seconds),
    )


def _reduce_task(
    destination: int,
    planned: Destinations,
    num_units: int,
    config: PreparationConfig,
    tokenizer: Tokenizer,
    folder: str,
) -> ReduceTask:
    return ReduceTask(
        name=shard_name("train", destination),
        destination=destination,
        destinations=planned,
        num_units=num_units,
        num_sources=num_units,
        first_source=0,
        source=None,
        record_tokens=config.shards.record_tokens,
        seed=config.shards.seed,
        exact_deduplication=config.deduplication.exact,
        vocab_size=tokenizer.vocab_size,
        token_dtype=dtype_name(tokenizer),
        tokenizer_folder=storage.absolute(tokenizer.url),
        tokenizer_fingerprint=tokenizer.fingerprint,
        work_folder=folder,
        output_folder=folder,
    )
