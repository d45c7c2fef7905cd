"""Files of MinHash signatures of a unit, in a layout in which one slice of all band keys is read without the rest.

A file is a sequence of blocks, each written once it has enough documents, so that a writer's memory is bounded.
A block of D documents holds

    entries     (E,) key uint64, document uint32: one for each band of each document, sorted by key
    starts      (1025,) uint32: where the entries begin whose key has these upper 10 bits, the bucket
    checksums   (1024,) uint64: of the entries of each bucket
    ids         (D,) uint64
    signatures  (D,) values (num_hashes,) uint32, checksum uint64

and the table of blocks is at the end of the file; everything read is verified by a checksum. Copies of a document
within a block have no entries, because they share all keys: a page that occurs a million times in a crawl would form
a group of a million.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import xxhash

from data_prep.base.errors import UserError
from data_prep.config.preparation_config import DeduplicationSettings
from data_prep.deduplication.signatures import ALGORITHM_VERSION, signatures
from data_prep.deduplication.similarity_search import band_keys, choose_bands
from data_prep.storage import storage
from data_prep.storage.sealed_files import CHECKSUM_BYTES, damaged, read_sealed, sealed

MAX_PARTS = 1024
_KEY_BITS = 10  # 2**10 == MAX_PARTS
_BLOCK_DOCUMENTS = 1 << 15
_BATCH_TOKENS = 1 << 20
_MAGIC = b"clozesg2"  # earlier releases, without checksums, used clozesig
_TRAILER = struct.Struct("<8sQ")  # magic, bytes of the table before it
_ENTRY = np.dtype([("key", "<u8"), ("document", "<u4")])
_STARTS_BYTES = (MAX_PARTS + 1) * 4 + MAX_PARTS * 8  # with the checksums of the buckets
_COPY_BYTES = 1 << 22
_GAP_ROWS = 128  # signatures that are read rather than skipped by a seek


class SignatureWriter:
    """Writer of signed documents for `SignatureFiles`; `close` ends the file."""

    def __init__(self, file: BinaryIO, settings: DeduplicationSettings) -> None:
        self._file = file
        self._settings = settings
        self._bands = choose_bands(settings.threshold, settings.num_hashes)
        self._tokens: list[np.ndarray] = []
        self._num_tokens = 0
        self._ids: list[int] = []
        self._signatures: list[np.ndarray] = []
        self._blocks: list[tuple[int, int, int]] = []

    def add(self, document_id: int, tokens: np.ndarray) -> None:
        """Add a document of tokens (n,) uint16 or uint32, not empty."""
        self._ids.append(document_id)
        self._tokens.append(tokens)
        self._num_tokens += len(tokens)
        if self._num_tokens >= _BATCH_TOKENS or len(self._ids) >= _BLOCK_DOCUMENTS:
            self._sign()
        if len(self._ids) >= _BLOCK_DOCUMENTS:
            self._write_block()

    def close(self) -> None:
        self._sign()
        if self._ids:
            self._write_block()
        _write_table(self._file, self._settings, self._blocks)

    def _sign(self) -> None:
        if self._tokens:
            self._signatures.append(signatures(self._tokens, self._settings))
            self._tokens, self._num_tokens = [], 0

    def _write_block(self) -> None:
        rows, ids = np.concatenate(self._signatures), np.array(self._ids, "<u8")
        firsts = np.sort(np.unique(ids, return_index=True)[1])
        keys = band_keys(rows[firsts], self._bands).ravel()
        order = np.argsort(keys, kind="stable")
        entries = np.empty(len(keys), _ENTRY)
        entries["key"] = keys[order]
        entries["document"] = firsts[order // self._bands.num_bands]
        boundaries = np.arange(MAX_PARTS, dtype=np.uint64) << np.uint64(64 - _KEY_BITS)
        starts = np.append(np.searchsorted(keys[order], boundaries), len(entries)).astype("<u4")
        signed = np.empty(len(rows), _signature_type(rows.shape[1]))
        signed["values"] = rows
        signed["checksum"] = _checksums(signed["values"])
        self._blocks.append((self._file.tell(), len(entries), len(rows)))
        self._file.write(entries.tobytes())
        self._file.write(sealed(starts.tobytes() + _checksums(_runs(entries, starts)).tobytes()))
        self._file.write(sealed(ids.tobytes()))
        self._file.write(signed.tobytes())
        self._ids, self._signatures = [], []


@contextlib.contextmanager
def open_signatures(url: str, settings: DeduplicationSettings) -> Iterator[SignatureWriter]:
    """Yield a writer to add documents to; the complete file is published when the block ends without error."""
    with storage.local_write(url) as path, open(path, "wb") as file:
        writer = SignatureWriter(file, settings)
        yield writer
        writer.close()


def join_signatures(urls: Sequence[str], url: str, settings: DeduplicationSettings) -> None:
    """Write the documents of several files, in their order, to one file; each file is read once.

    Raises:
        UserError: as `SignatureFiles`.
    """
    blocks: list[tuple[int, int, int]] = []
    with storage.local_write(url) as path, open(path, "wb") as joined:
        for part in urls:
            with storage.open_read(part) as file:
                shift = joined.tell()
                of_part, num_bytes = _read_table(file, part, settings)
                blocks += [
                    (shift + offset, num_entries, num_documents) for offset, num_entries, num_documents in of_part
                ]
                file.seek(0)
                while num_bytes:
                    if not (data := file.read(min(num_bytes, _COPY_BYTES))):
                        raise damaged(part)
                    joined.write(data)
                    num_bytes -= len(data)
        _write_table(joined, settings, blocks)


@dataclass(frozen=True)
class _Block:
    """Offsets of the parts of a block in its file, and the index of its first document."""

    url: str
    offset: int
    num_entries: int
    num_documents: int
    first_index: int

    @property
    def starts_offset(self) -> int:
        return self.offset + self.num_entries * _ENTRY.itemsize

    @property
    def ids_offset(self) -> int:
        return self.starts_offset + _STARTS_BYTES + CHECKSUM_BYTES

    @property
    def signatures_offset(self) -> int:
        return self.ids_offset + self.num_documents * 8 + CHECKSUM_BYTES


class SignatureFiles:
    """Documents of several signature files, identified by their index over all files; a context manager.

    Each file is opened once and stays open, so there should be few: `join_signatures` makes few of many.

    Attributes:
        first_indices: index of the first document of each file; the last is the number of all documents.
        num_entries: of all files.
    """

    def __init__(self, urls: Sequence[str], settings: DeduplicationSettings) -> None:
        """Read the tables of the files.

        Raises:
            UserError: a file is damaged, or was made with other settings or another version of rensa.
        """
        self._num_hashes = settings.num_hashes
        self._blocks: list[_Block] = []
        self.first_indices = [0]
        self.num_entries = 0
        self._stack = contextlib.ExitStack()
        self._files: dict[str, BinaryIO] = {}
        for url in urls:
            index = self.first_indices[-1]
            if url not in self._files:
                self._files[url] = self._stack.enter_context(storage.open_read(url))
            for offset, num_entries, num_documents in _read_table(self._files[url], url, settings)[0]:
                self._blocks.append(_Block(url, offset, num_entries, num_documents, index))
                self.num_entries += num_entries
                index += num_documents
            self.first_indices.append(index)

    def __enter__(self) -> SignatureFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def entries(self, part: int, num_parts: int) -> tuple[np.ndarray, np.ndarray]:
        """Read all band keys of a part of their range: keys (E,) uint64, indices (E,) int64; `num_parts` divides 1024.

        Raises:
            UserError: a file is damaged; also raised by the other methods.
        """
        buckets = slice(part * MAX_PARTS // num_parts, (part + 1) * MAX_PARTS // num_parts)
        keys, indices = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
        for block in self._blocks:
            file = self._files[block.url]
            data = read_sealed(file, block.url, block.starts_offset, _STARTS_BYTES)
            starts = np.frombuffer(data, "<u4", MAX_PARTS + 1)[buckets.start : buckets.stop + 1].astype(np.int64)
            checksums = np.frombuffer(data, "<u8", MAX_PARTS, (MAX_PARTS + 1) * 4)[buckets]
            first, last = starts[0], starts[-1]
            entries = _read(file, block.offset + int(first) * _ENTRY.itemsize, _ENTRY, int(last - first))
            _check(_checksums(_runs(entries, starts - first)), checksums, block)
            keys.append(entries["key"].astype(np.uint64))
            indices.append(entries["document"].astype(np.int64) + block.first_index)
        return np.concatenate(keys), np.concatenate(indices)

    def document_ids(self, indices: np.ndarray) -> np.ndarray:
        """Read the ids (n,) uint64 of the documents with these indices (n,) int64, ascending."""
        ids = np.empty(len(indices), np.uint64)
        for file, block, wanted in self._found(indices):
            of_block = np.frombuffer(read_sealed(file, block.url, block.ids_offset, block.num_documents * 8), "<u8")
            ids[wanted] = of_block[indices[wanted] - block.first_index]
        return ids

    def signatures(self, indices: np.ndarray) -> np.ndarray:
        """Read the signatures (n, num_hashes) uint32 of the documents with these indices (n,) int64, ascending."""
        rows = np.empty((len(indices), self._num_hashes), np.uint32)
        for file, block, wanted in self._found(indices):
            rows[wanted] = self._read_signatures(file, block, indices[wanted] - block.first_index)
        return rows

    def _read_signatures(self, file: BinaryIO, block: _Block, numbers: np.ndarray) -> np.ndarray:
        runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > _GAP_ROWS) + 1)
        signature, rows = _signature_type(self._num_hashes), []
        for run in runs:
            first, last = int(run[0]), int(run[-1])
            found = _read(file, block.signatures_offset + first * signature.itemsize, signature, last - first + 1)
            rows.append(found[run - first])
        signed = np.concatenate(rows)
        values = np.ascontiguousarray(signed["values"])
        _check(_checksums(values), signed["checksum"], block)
        return values

    def _found(self, indices: np.ndarray) -> Iterator[tuple[BinaryIO, _Block, slice]]:
        """Yield the blocks that hold any of the indices, with the slice that each holds."""
        firsts = np.array([block.first_index for block in self._blocks], np.int64)
        bounds = np.append(np.searchsorted(indices, firsts), len(indices)).tolist()
        wanted = {block: slice(*bounds[number : number + 2]) for number, block in enumerate(self._blocks)}
        for block, part in wanted.items():
            if part.stop > part.start:
                yield self._files[block.url], block, part


def _described(settings: DeduplicationSettings) -> dict[str, Any]:
    bands = choose_bands(settings.threshold, settings.num_hashes)
    return {
        "algorithm_version": ALGORITHM_VERSION,
        "ngram_tokens": settings.ngram_tokens,
        "num_hashes": settings.num_hashes,
        "num_bands": bands.num_bands,
        "rows": bands.rows,
    }


def _write_table(file: BinaryIO, settings: DeduplicationSettings, blocks: Sequence[tuple[int, int, int]]) -> None:
    table = json.dumps({**_described(settings), "blocks": blocks}).encode()
    file.write(sealed(table) + sealed(_TRAILER.pack(_MAGIC, len(table))))


def _read_table(file: BinaryIO, url: str, settings: DeduplicationSettings) -> tuple[list[tuple[int, int, int]], int]:
    """Read offset, entries and documents of every block of a file; the table begins at the byte that is returned."""
    offset = max(0, file.seek(0, 2) - _TRAILER.size - CHECKSUM_BYTES)
    magic, table_bytes = _TRAILER.unpack(read_sealed(file, url, offset, _TRAILER.size))
    if magic != _MAGIC:
        raise damaged(url)
    offset -= table_bytes + CHECKSUM_BYTES
    table: dict[str, Any] = json.loads(bytes(read_sealed(file, url, offset, table_bytes)))
    blocks: list[tuple[int, int, int]] = table.pop("blocks")
    if table != _described(settings):
        raise UserError(
            f"the signatures in {storage.redact(url)} were made as {table} and cannot be compared with "
            f"{_described(settings)}",
            fix="use the same version of rensa everywhere, and rerun the command with --fresh",
            code="signature-mismatch",
        )
    return blocks, offset


def _read(file: BinaryIO, offset: int, dtype: Any, count: int) -> np.ndarray:
    file.seek(offset)
    return np.frombuffer(file.read(count * np.dtype(dtype).itemsize), dtype, count)


def _signature_type(num_hashes: int) -> np.dtype[Any]:
    return np.dtype([("values", "<u4", (num_hashes,)), ("checksum", "<u8")])


def _runs(entries: np.ndarray, starts: np.ndarray) -> Iterator[np.ndarray]:
    """Return the entries between each start and the next."""
    for start, stop in itertools.pairwise(starts.tolist()):
        yield entries[start:stop]


def _checksums(parts: Iterable[np.ndarray]) -> np.ndarray:
    """(n,) uint64 of n arrays."""
    return np.array([xxhash.xxh3_64_intdigest(part.tobytes()) for part in parts], "<u8")


def _check(found: np.ndarray, written: np.ndarray, block: _Block) -> None:
    if not np.array_equal(found, written):
        raise damaged(block.url)
