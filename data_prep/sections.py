"""The work file of one unit: its encoded documents, sectioned by the shard that they will go to.

A file is written front to back in bounded memory: now and then the buffered documents are written as one
section for each destination, and the table of all sections stands at the end. So a shard reads its own
sections by offset.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

from data_prep import storage
from data_prep.errors import UserError

FLUSH_TOKENS = 16_000_000
_MAGIC = b"clozesec"
_TRAILER = struct.Struct("<8sQQQQ")  # magic, flushes, destinations, offset of the table, bytes of the summary
_SECTION = struct.Struct("<QQQ")  # documents, sentences, tokens


@dataclass(frozen=True)
class Section:
    """Documents in the order in which they were read.

    Attributes:
        document_ids: (D,) uint64.
        document_lengths: (D,) uint32 tokens of each.
        sentence_counts: (D,) uint32 sentences of each.
        sentence_lengths: (S,) uint32 tokens of each sentence.
        tokens: (T,) uint16 or uint32.
    """

    document_ids: np.ndarray
    document_lengths: np.ndarray
    sentence_counts: np.ndarray
    sentence_lengths: np.ndarray
    tokens: np.ndarray


@dataclass
class _Buffer:
    document_ids: list[int] = field(default_factory=list)
    sentence_lengths: list[np.ndarray] = field(default_factory=list)
    tokens: list[np.ndarray] = field(default_factory=list)


class SectionWriter:
    """Writes a work file; `close` ends it with its table and a summary."""

    def __init__(self, file: BinaryIO, num_destinations: int, token_dtype: type[np.unsignedinteger]) -> None:
        self._file = file
        self._dtype = token_dtype
        self._buffers = [_Buffer() for _ in range(num_destinations)]
        self._buffered_tokens = 0
        self._offsets: list[np.ndarray] = []
        self._document_counts = np.zeros(num_destinations, np.uint64)

    def add(self, destination: int, document_id: int, tokens: np.ndarray, sentence_starts: np.ndarray) -> None:
        """Add a document; `sentence_starts` (S,) are offsets into its tokens, the first 0."""
        buffer = self._buffers[destination]
        buffer.document_ids.append(document_id)
        buffer.sentence_lengths.append(np.diff(sentence_starts, append=len(tokens)).astype(np.uint32))
        buffer.tokens.append(tokens)
        self._document_counts[destination] += np.uint64(1)
        self._buffered_tokens += len(tokens)
        if self._buffered_tokens >= FLUSH_TOKENS:
            self._flush()

    def close(self, summary: dict[str, Any]) -> None:
        if self._buffered_tokens:
            self._flush()
        table_offset = self._file.tell()
        for offsets in self._offsets:
            self._file.write(offsets.tobytes())
        self._file.write(self._document_counts.tobytes())
        data = json.dumps(summary).encode()
        self._file.write(data)
        self._file.write(_TRAILER.pack(_MAGIC, len(self._offsets), len(self._buffers), table_offset, len(data)))

    def _flush(self) -> None:
        offsets = np.zeros(len(self._buffers) + 1, np.uint64)
        for destination, buffer in enumerate(self._buffers):
            offsets[destination] = self._file.tell()
            if buffer.document_ids:
                self._write_section(buffer)
        offsets[-1] = self._file.tell()
        self._offsets.append(offsets)
        self._buffers = [_Buffer() for _ in self._buffers]
        self._buffered_tokens = 0

    def _write_section(self, buffer: _Buffer) -> None:
        arrays = (
            np.array(buffer.document_ids, np.uint64),
            np.array([len(tokens) for tokens in buffer.tokens], np.uint32),
            np.array([len(lengths) for lengths in buffer.sentence_lengths], np.uint32),
            np.concatenate(buffer.sentence_lengths),
            np.concatenate(buffer.tokens).astype(self._dtype),
        )
        self._file.write(_SECTION.pack(len(arrays[0]), len(arrays[3]), len(arrays[4])))
        for array in arrays:
            self._file.write(array.tobytes())


def read_summary(url: str) -> tuple[dict[str, Any], np.ndarray]:
    """The summary of a work file, and its number of documents for each destination."""
    with storage.open_read(url) as file:
        flushes, destinations, table_offset, summary_bytes = _read_trailer(file, url)
        file.seek(table_offset + flushes * (destinations + 1) * 8)
        counts = np.frombuffer(file.read(destinations * 8), np.uint64)
        return json.loads(file.read(summary_bytes)), counts


def read_sections(url: str, destination: int, token_dtype: type[np.unsignedinteger]) -> Iterator[Section]:
    """The sections of one destination, in the order in which they were written."""
    with storage.open_read(url) as file:
        flushes, destinations, table_offset, _ = _read_trailer(file, url)
        for flush in range(flushes):
            file.seek(table_offset + (flush * (destinations + 1) + destination) * 8)
            start, stop = struct.unpack("<QQ", file.read(16))
            if stop > start:
                file.seek(start)
                yield _parse_section(file.read(stop - start), token_dtype)


def _parse_section(data: bytes, token_dtype: type[np.unsignedinteger]) -> Section:
    documents, sentences, tokens = _SECTION.unpack_from(data)
    offset = _SECTION.size
    arrays = []
    for count, dtype in (
        (documents, np.uint64),
        (documents, np.uint32),
        (documents, np.uint32),
        (sentences, np.uint32),
        (tokens, token_dtype),
    ):
        arrays.append(np.frombuffer(data, dtype, count, offset))
        offset += arrays[-1].nbytes
    return Section(*arrays)


def _read_trailer(file: BinaryIO, url: str) -> tuple[int, int, int, int]:
    file.seek(0, 2)
    end = file.tell()
    file.seek(max(0, end - _TRAILER.size))
    data = file.read()
    magic, *values = _TRAILER.unpack(data) if len(data) == _TRAILER.size else (b"",)
    if magic != _MAGIC:
        raise UserError(f"{storage.redact(url)} is damaged; run the same command again with --fresh")
    flushes, destinations, table_offset, summary_bytes = values
    return flushes, destinations, table_offset, summary_bytes
