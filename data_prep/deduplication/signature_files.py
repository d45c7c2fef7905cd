"""MinHash signatures, and files of those of a unit.

Two documents are compared by the Jaccard similarity of their sets of n-grams (Broder 1997, "On the resemblance and
containment of documents"). The n-grams consist of tokens, not words: Chinese, Japanese and Thai have no spaces between
words, and the texts are already tokenized. Similarity is measured on the tokens that the model is trained on.

The files of a unit have a layout in which one slice of all band keys is read without the rest.

A file is a parts file. Each row is a block of documents, written once it has enough of them, so that a writer's memory
is bounded. The parts of a block of D documents are

    entries     1024 parts: those whose key has the same upper 10 bits, the bucket; an entry is key uint64, document
                uint32, one for each band of each document, sorted by key
    ids         (D,) uint64
    signatures  (D,) values (num_hashes,) uint32, checksum uint64

A signature has a checksum of its own, since few of a block are read. Copies of a document within a block have no
entries, because they share all keys: a page that occurs a million times in a crawl would form a group of a million.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import xxhash
from rensa import RMinHash

from data_prep.base.errors import UserError
from data_prep.config.preparation_config import DeduplicationSettings
from data_prep.deduplication.similarity_search import band_keys, choose_bands, mix
from data_prep.storage import storage
from data_prep.storage.work_files import PartsFile, PartsWriter, damaged, open_parts

MAX_PARTS = 1024
_KEY_BITS = 10  # 2**10 == MAX_PARTS
_BLOCK_DOCUMENTS = 1 << 15
_BATCH_TOKENS = 1 << 20
_KIND = b"clozesg3"
_IDS, _SIGNATURES, _NUM_COLUMNS = MAX_PARTS, MAX_PARTS + 1, MAX_PARTS + 2  # of the parts of a block
_ENTRY = np.dtype([("key", "<u8"), ("document", "<u4")])
_GAP_ROWS = 128  # signatures that are read rather than skipped by a seek
# Version of rensa, which identifies the algorithm: signatures of different versions cannot be compared.
ALGORITHM_VERSION = RMinHash.ALGORITHM_VERSION
_SEED = 1
_MULTIPLIER = 0x9E3779B97F4A7C13  # odd, so that it has an inverse among the 64-bit words
_CHUNK_TOKENS = 1 << 16  # fits in a core's cache


class SignatureWriter:
    """Writer of signed documents for `SignatureFiles`; `close` ends the file."""

    def __init__(self, file: BinaryIO, settings: DeduplicationSettings) -> None:
        self._parts = PartsWriter(file, _KIND, _NUM_COLUMNS)
        self._settings = settings
        self._bands = choose_bands(settings.threshold, settings.num_hashes)
        self._tokens: list[np.ndarray] = []
        self._num_tokens = 0
        self._ids: list[int] = []
        self._signatures: list[np.ndarray] = []
        self._block_sizes: list[tuple[int, int]] = []

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
        self._parts.close(_table(self._settings, self._block_sizes))

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
        starts = np.append(np.searchsorted(keys[order], boundaries), len(entries))
        signed = np.empty(len(rows), _signature_type(rows.shape[1]))
        signed["values"] = rows
        signed["checksum"] = _checksums(signed["values"])
        self._block_sizes.append((len(entries), len(rows)))
        for start, stop in itertools.pairwise(starts.tolist()):
            self._parts.add(entries[start:stop].tobytes())
        self._parts.add(ids.tobytes())
        self._parts.add(signed.tobytes())
        self._ids, self._signatures = [], []


@contextlib.contextmanager
def open_signatures(url: str, settings: DeduplicationSettings) -> Iterator[SignatureWriter]:
    """Yield a writer to add documents to; the complete file is published when the block ends without error."""
    with storage.local_write(url) as path, open(path, "wb") as file:
        writer = SignatureWriter(file, settings)
        yield writer
        writer.close()


def join_signatures(urls: Sequence[str], url: str, settings: DeduplicationSettings) -> None:
    """Write the documents of several files, in their order, to one file; each file is read once."""
    block_sizes: list[tuple[int, int]] = []
    with storage.local_write(url) as path, open(path, "wb") as file:
        writer = PartsWriter(file, _KIND, _NUM_COLUMNS)
        for one in urls:
            with open_parts(one, _KIND) as parts:
                block_sizes += _read_block_sizes(parts, one, settings)
                writer.append(parts)
        writer.close(_table(settings, block_sizes))


@dataclass(frozen=True)
class _Block:
    """A row of a file, with the number of its documents and the index of the first."""

    url: str
    row: int
    num_documents: int
    first_index: int


class SignatureFiles:
    """Documents of several signature files, identified by their index over all files; a context manager.

    Each file is opened once and stays open, so there should be few: `join_signatures` makes few of many.

    Attributes:
        first_indices: index of the first document of each file; the last is the number of all documents.
        num_entries: of all files.
    """

    def __init__(self, urls: Sequence[str], settings: DeduplicationSettings) -> None:
        """Read the tables of the files."""
        self._num_hashes = settings.num_hashes
        self._blocks: list[_Block] = []
        self.first_indices = [0]
        self.num_entries = 0
        self._stack = contextlib.ExitStack()
        self._files: dict[str, PartsFile] = {}
        for url in urls:
            index = self.first_indices[-1]
            if url not in self._files:
                self._files[url] = self._stack.enter_context(open_parts(url, _KIND))
            for row, (num_entries, num_documents) in enumerate(_read_block_sizes(self._files[url], url, settings)):
                self._blocks.append(_Block(url, row, num_documents, index))
                self.num_entries += num_entries
                index += num_documents
            self.first_indices.append(index)

    def __enter__(self) -> SignatureFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def entries(self, part: int, num_parts: int) -> tuple[np.ndarray, np.ndarray]:
        """Read the keys of a part of their range: keys (E,) uint64, indices (E,) int64; `num_parts` divides 1024."""
        first, stop = part * MAX_PARTS // num_parts, (part + 1) * MAX_PARTS // num_parts
        keys, indices = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
        for block in self._blocks:
            entries = np.frombuffer(self._files[block.url].read(block.row, first, stop), _ENTRY)
            keys.append(entries["key"].astype(np.uint64))
            indices.append(entries["document"].astype(np.int64) + block.first_index)
        return np.concatenate(keys), np.concatenate(indices)

    def document_ids(self, indices: np.ndarray) -> np.ndarray:
        """Read the ids (n,) uint64 of the documents with these indices (n,) int64, ascending."""
        ids = np.empty(len(indices), np.uint64)
        for block, wanted in self._found(indices):
            of_block = np.frombuffer(self._files[block.url].read(block.row, _IDS), "<u8")
            ids[wanted] = of_block[indices[wanted] - block.first_index]
        return ids

    def signatures(self, indices: np.ndarray) -> np.ndarray:
        """Read the signatures (n, num_hashes) uint32 of the documents with these indices (n,) int64, ascending."""
        rows = np.empty((len(indices), self._num_hashes), np.uint32)
        for block, wanted in self._found(indices):
            rows[wanted] = self._read_signatures(block, indices[wanted] - block.first_index)
        return rows

    def _read_signatures(self, block: _Block, numbers: np.ndarray) -> np.ndarray:
        runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > _GAP_ROWS) + 1)
        signature, rows = _signature_type(self._num_hashes), []
        parts = self._files[block.url]
        (part,) = parts.entries(block.row, _SIGNATURES, _NUM_COLUMNS)
        for run in runs:
            first, last = int(run[0]), int(run[-1])
            num_bytes = (last - first + 1) * signature.itemsize
            data = parts.read_unchecked(part.offset + first * signature.itemsize, num_bytes)
            rows.append(np.frombuffer(data, signature, last - first + 1)[run - first])
        signed = np.concatenate(rows)
        values = np.ascontiguousarray(signed["values"])
        if not np.array_equal(_checksums(values), signed["checksum"]):
            raise damaged(block.url)
        return values

    def _found(self, indices: np.ndarray) -> Iterator[tuple[_Block, slice]]:
        """Yield the blocks that hold any of the indices, with the slice that each holds."""
        firsts = np.array([block.first_index for block in self._blocks], np.int64)
        bounds = np.append(np.searchsorted(indices, firsts), len(indices)).tolist()
        wanted = {block: slice(*bounds[number : number + 2]) for number, block in enumerate(self._blocks)}
        for block, part in wanted.items():
            if part.stop > part.start:
                yield block, part


def _described(settings: DeduplicationSettings) -> dict[str, Any]:
    bands = choose_bands(settings.threshold, settings.num_hashes)
    return {
        "algorithm_version": ALGORITHM_VERSION,
        "ngram_tokens": settings.ngram_tokens,
        "num_hashes": settings.num_hashes,
        "num_bands": bands.num_bands,
        "rows": bands.rows,
    }


def _table(settings: DeduplicationSettings, block_sizes: Sequence[tuple[int, int]]) -> dict[str, Any]:
    return {**_described(settings), "block_sizes": block_sizes}


def _read_block_sizes(parts: PartsFile, url: str, settings: DeduplicationSettings) -> list[tuple[int, int]]:
    """Read the numbers of entries and documents of every block of a file."""
    table: dict[str, Any] = parts.table()
    block_sizes: list[tuple[int, int]] = table.pop("block_sizes")
    if table != _described(settings):
        raise UserError(
            f"the signatures in {storage.redact(url)} were made as {table} and cannot be compared with "
            f"{_described(settings)}",
            fix="use the same version of rensa everywhere, and rerun the command with --fresh",
            code="signature-mismatch",
        )
    return block_sizes


def _signature_type(num_hashes: int) -> np.dtype[Any]:
    return np.dtype([("values", "<u4", (num_hashes,)), ("checksum", "<u8")])


def _checksums(parts: Iterable[np.ndarray]) -> np.ndarray:
    """(n,) uint64 of n arrays."""
    return np.array([xxhash.xxh3_64_intdigest(part.tobytes()) for part in parts], "<u8")


def signatures(tokens: Sequence[np.ndarray], settings: DeduplicationSettings) -> np.ndarray:
    """Return the MinHash signature of every document, (D, num_hashes) uint32.

    The share of equal values of two signatures approximates the Jaccard similarity of the n-gram sets. A document
    shorter than an n-gram is a single n-gram. A signature depends only on its document and the settings: not on other
    documents, the machine, or the dtype of the tokens.

    Args:
        tokens: tokens of each document, (n,) uint16 or uint32; no document is empty.
    """
    if not tokens:
        return np.empty((0, settings.num_hashes), np.uint32)
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    hashes, counts = ngram_hashes(np.concatenate(tokens), lengths, settings.ngram_tokens)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint64)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(hashes, offsets, settings.num_hashes, _SEED)
    return np.array(matrix.to_rows(), np.uint32)


def ngram_hashes(tokens: np.ndarray, lengths: np.ndarray, ngram_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes (G,) uint64 of the n-grams of concatenated documents, and the number of each, (D,).

    The hash of n tokens is the polynomial sum(word(t_k) * M**k) of 64-bit words, mixed. It is a difference of running
    sums divided by a power of M, so its cost does not grow with n (Karp and Rabin 1987, with all windows at once).

    Args:
        tokens: (T,) of any unsigned dtype.
        lengths: (D,) tokens of each document, none 0.
    """
    assert lengths.all() and lengths.sum() == len(tokens)
    stops = np.cumsum(lengths)
    begins_ngram = np.ones(len(tokens), bool)
    for tokens_before_end in range(1, ngram_tokens):
        begins_ngram[stops[lengths > tokens_before_end] - tokens_before_end] = False
    short_stops = stops[lengths < ngram_tokens]
    short_starts = short_stops - lengths[lengths < ngram_tokens]

    counts = np.maximum(lengths - ngram_tokens + 1, 1)
    hashes = np.empty(counts.sum(), np.uint64)
    powers, inverse_powers = _powers(_CHUNK_TOKENS + ngram_tokens)
    done = 0
    for chunk_start in range(0, len(tokens), _CHUNK_TOKENS):
        chunk_stop = min(chunk_start + _CHUNK_TOKENS, len(tokens))
        words = mix(tokens[chunk_start : chunk_stop + ngram_tokens].astype(np.uint64))
        sums = np.zeros(len(words) + 1, np.uint64)
        np.cumsum(words * powers[: len(words)], out=sums[1:])
        starts = np.flatnonzero(begins_ngram[chunk_start:chunk_stop])
        ends = starts + ngram_tokens
        short = slice(*np.searchsorted(short_starts, (chunk_start, chunk_stop)))
        ends[np.searchsorted(starts, short_starts[short] - chunk_start)] = short_stops[short] - chunk_start
        hashes[done : done + len(starts)] = mix((sums[ends] - sums[starts]) * inverse_powers[starts])
        done += len(starts)
    return hashes, counts


@functools.lru_cache(maxsize=2)
def _powers(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the powers 0 to count - 1 of the multiplier and of its inverse modulo 2**64, (count,) uint64 each."""

    def powers_of(base: int) -> np.ndarray:
        values = np.full(count, base, np.uint64)
        values[0] = 1
        return np.cumprod(values, dtype=np.uint64)

    return powers_of(_MULTIPLIER), powers_of(pow(_MULTIPLIER, -1, 1 << 64))
