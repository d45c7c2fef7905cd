"""Reading the beginning of a unit, from which the rest is estimated."""

from __future__ import annotations

import io
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO

from data_prep.config.preparation_config import DocumentSettings, PreparationConfig
from data_prep.documents.document import Document
from data_prep.documents.input_units import InputUnit, file_format, is_one_document
from data_prep.documents.lines import Line, blank_line_blocks, bounded_lines, skip_to_line
from data_prep.documents.rejects import BadInput
from data_prep.filters.filtered_reader import FilteredReader
from data_prep.pipeline.encoding import encode_documents
from data_prep.pipeline.sections import Section, join_sections
from data_prep.storage import storage
from data_prep.storage.compression import decompress
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


def sample_unit(unit: InputUnit, config: PreparationConfig, tokenizer: Tokenizer, most_characters: int) -> Sample:
    """Read and encode the unit's first documents, of about `most_characters` in all."""
    settings, source = config.documents, config.sources[unit.source]
    language = source.language or settings.language
    reader = FilteredReader(unit, settings, source.name, source.text_field)
    dropped: Counter[str] = Counter()
    parts: list[Section] = []
    num_documents = 0
    started_at = time.perf_counter()
    try:
        for batch in _batches(reader, most_characters):
            num_documents += len(batch)
            parts.append(encode_documents(batch, tokenizer, settings, language, dropped)[0])
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


def _batches(reader: FilteredReader, most_characters: int) -> Iterator[list[Document]]:
    """The first documents, in parts that bound memory; one more is read, so that the end of the unit is noticed."""
    batch: list[Document] = []
    characters = in_batch = 0
    for document in reader:
        if characters >= most_characters:
            break
        batch.append(document)
        characters += len(document.text)
        in_batch += len(document.text)
        if in_batch >= _BATCH_CHARACTERS:
            yield batch
            batch, in_batch = [], 0
    if batch:
        yield batch


def _bytes_of(unit: InputUnit, num_documents: int, reader: FilteredReader, settings: DocumentSettings) -> float:
    """About how many bytes of its file the unit's first documents take."""
    if reader.num_rows is not None:
        return unit.bytes * num_documents / max(reader.num_rows, 1)
    ending, compression = file_format(unit.url)
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
