"""The shard: a webdataset tar of records and the index beside it.

A record is a block of whole documents. Its members are plain `.npy` arrays, so that
`webdataset.WebDataset(url).decode()` reads a shard without our code. The index has the lengths of records, documents
and sentences, to plan and read rows without the tar.
"""

from __future__ import annotations

import dataclasses
import io
import os
import re
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import safetensors.numpy

from data_prep.base.errors import UsageError, UserError
from data_prep.dataset.manifest_records import REBUILD, ShardRecord, read_file, record_of
from data_prep.storage import storage

SHARD_NAME = re.compile(r"(train|valid)-(\d{6})\.(tar|index\.safetensors|provenance\.parquet)")
MAX_SHARDS = 1_000_000
"""Shards of a split, through all its versions, that the digits of `SHARD_NAME` can count."""
_TAR_BLOCK = 512
TENSOR_FAULTS = (safetensors.SafetensorError, ValueError, TypeError, LookupError)
"""What reading a safetensors file may raise: a KeyError, for one, where its numbers are of a type unknown to numpy."""


@dataclass(frozen=True)
class Record:
    """A block of whole documents: what one key of a shard holds.

    Attributes:
        tokens: (num_tokens,) uint16 or uint32; without [CLS], [SEP], [PAD] and [MASK].
        documents: (D,) uint32 start offset of every document, the first 0.
        sentences: (S,) uint32 start offset of every sentence, the first 0; every document start is one of
            them.
        sources: (D,) uint16 number of each document's source in the manifest.
        document_ids: (D,) uint64 xxh3_64 of each document's normalized text.
    """

    tokens: np.ndarray
    documents: np.ndarray
    sentences: np.ndarray
    sources: np.ndarray
    document_ids: np.ndarray


_MEMBER_DTYPES: dict[str, tuple[type, ...]] = {
    "document_ids": (np.uint64,),
    "documents": (np.uint32,),
    "sentences": (np.uint32,),
    "sources": (np.uint16,),
    "tokens": (np.uint16, np.uint32),
}
_MEMBER_NAME = re.compile(r"([0-9-]+)\.(" + "|".join(_MEMBER_DTYPES) + r")\.npy")
_NPY_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00(..)\{'descr': '(<u[248])', 'fortran_order': False, 'shape': \((\d{1,12}),\), \} *\n",
    re.DOTALL,
)


def shard_name(split: Literal["train", "valid"], number: int) -> str:
    """Return the name of a shard without its suffix, such as `train-000000`."""
    if number >= MAX_SHARDS:
        raise UsageError(
            f"the {split} split needs more than the {MAX_SHARDS:,} shards that file names can number, those of older "
            "versions included",
            fix="make a new data set with a larger shards.shard_bytes",
            code="too-many-shards",
        )
    return f"{split}-{number:06d}"


def write_shard(folder: str, name: str, records: Iterable[Record]) -> ShardRecord:
    """Write `name`.tar and its index into `folder`, each atomically; the bytes depend on the records alone."""
    tar_url, index_url = (
        storage.join(folder, f"{name}.tar"),
        storage.join(folder, f"{name}.index.safetensors"),
    )
    parts: list[ShardIndex] = []
    with storage.local_write(tar_url) as path:
        with open(path, "wb") as file:
            parts.extend(_write_records(file, name.rpartition("-")[2], records))
        size, sha256 = path.stat().st_size, storage.sha256_of(path)
    index = join_indexes(parts)
    data = safetensors.numpy.save(dataclasses.asdict(index))
    storage.write_bytes(index_url, data)
    return ShardRecord(
        name=f"{name}.tar",
        bytes=size,
        sha256=sha256,
        index=record_of(f"{name}.index.safetensors", data),
        records=len(index.token_offsets),
        documents=len(index.document_lengths),
        sentences=len(index.sentence_lengths),
        tokens=int(index.document_lengths.sum(dtype=np.int64)),
        min_document_tokens=int(index.document_lengths.min(initial=np.iinfo(np.uint32).max)) if parts else 0,
    )


def read_records(path: str | Path) -> Iterator[tuple[str, Record, int]]:
    """Yield a shard's records in order, strictly checked: (key, record, byte offset of the token data).

    Members that none of our shards has (links, sparse files, folders in the name, other endings, keys out of order,
    object arrays) are refused before their content is read; nothing is unpickled, evaluated or written.

    Raises:
        UserError: the tar is damaged or is not a shard.
    """
    waiting: dict[str, np.ndarray] = {}
    key = offset = None
    try:
        with _BoundedFile(path) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                match = _MEMBER_NAME.fullmatch(member.name)
                # A sparse member of a few bytes, or one that a pax header declares sparse, may read as any number of
                # zeros.
                if not match or member.type != tarfile.REGTYPE or member.issparse() or member.pax_headers:
                    raise _damaged(f"{path} holds {member.name!r}, which no shard has")
                stem, field = match.groups()
                if field in waiting or ((stem != key) if waiting else (key is not None and stem <= key)):
                    raise _damaged(f"{path} has record {stem!r} out of its place")
                key = stem
                waiting[field], header_bytes = _read_array(tar, member, path)
                offset = member.offset_data + header_bytes if field == "tokens" else offset
                if len(waiting) == len(_MEMBER_DTYPES):
                    yield key, Record(**waiting), offset or 0
                    waiting = {}
    except (tarfile.TarError, EOFError, OSError, ValueError, OverflowError) as error:  # the last two: of pax headers
        raise _damaged(f"{path} is damaged ({error})") from None
    if waiting:
        raise _damaged(f"{path} ends within record {key!r}")


def index_of(record: Record, token_offset: int) -> ShardIndex:
    """Return the index of a shard with this one record."""
    total = len(record.tokens)
    first_sentences = np.searchsorted(record.sentences, record.documents)
    return ShardIndex(
        document_lengths=np.diff(record.documents, append=np.uint32(total)).astype(np.uint32),
        sentence_counts=np.diff(first_sentences, append=len(record.sentences)).astype(np.uint32),
        sentence_lengths=np.diff(record.sentences, append=np.uint32(total)).astype(np.uint32),
        document_ids=record.document_ids,
        document_sources=record.sources,
        record_document_counts=np.array([len(record.documents)], np.uint32),
        token_offsets=np.array([token_offset], np.uint64),
    )


def _damaged(problem: str) -> UserError:
    return UserError(problem, fix=REBUILD, code="damaged-shard")


def _write_records(file: BinaryIO, prefix: str, records: Iterable[Record]) -> Iterator[ShardIndex]:
    """Write the records to a tar and yield the index of each."""
    # The standard library's writer: webdataset's imports torch where it is installed, which costs seconds and hundreds
    # of MB per process. A file object in "w:" mode is written to as it is, with no blocks of its own.
    with tarfile.open(fileobj=file, mode="w:") as tar:
        for number, record in enumerate(records):
            for field in _MEMBER_DTYPES:
                data = _array_bytes(getattr(record, field))
                tar.addfile(_member(f"{prefix}-{number:05d}.{field}.npy", len(data)), io.BytesIO(data))
            # The tokens come last.
            padded = -(-len(data) // _TAR_BLOCK) * _TAR_BLOCK
            yield index_of(record, tar.offset - padded + len(data) - record.tokens.nbytes)


def _member(name: str, size: int) -> tarfile.TarInfo:
    """Return a header as `webdataset.TarWriter` writes it, without the time and user name of tar's defaults."""
    member = tarfile.TarInfo(name)
    member.size, member.mtime, member.mode = size, 0, 0o444
    member.uname = member.gname = "bigdata"
    return member


def _array_bytes(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.ascontiguousarray(array), version=(1, 0), allow_pickle=False)
    return buffer.getvalue()


class _BoundedFile(io.BufferedReader):
    """A file that never reads more bytes than it contains.

    tarfile allocates and reads as many bytes as a header declares for a long name or pax headers.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(io.FileIO(path))
        self._bytes = os.fstat(self.fileno()).st_size

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(size if size is None else min(size, self._bytes))


def _read_array(tar: tarfile.TarFile, member: tarfile.TarInfo, path: str | Path) -> tuple[np.ndarray, int]:
    """Return a member's array and the bytes of its header, which must be as `_array_bytes` writes them.

    numpy's reader evaluates the header as an expression, which a crafted header can exhaust.
    """
    if member.offset_data + member.size > Path(path).stat().st_size:
        raise _damaged(f"{path} ends within {member.name!r}")
    file = tar.extractfile(member)
    assert file is not None
    data = file.read()
    header = _NPY_HEADER.match(data)
    field = member.name.partition(".")[2].removesuffix(".npy")
    if header is None or int.from_bytes(header[1], "little") + 10 != header.end():
        raise _damaged(f"{path} holds a damaged array {member.name!r}")
    dtype, length = np.dtype(header[2].decode()), int(header[3])
    if (
        dtype not in [np.dtype(kind) for kind in _MEMBER_DTYPES[field]]
        or length * dtype.itemsize != len(data) - header.end()
    ):
        raise _damaged(f"{path} holds {member.name!r} of type {dtype} and {length} values, which no shard has")
    return np.frombuffer(data, dtype, offset=header.end()), header.end()


@dataclass(frozen=True)
class ShardIndex:
    """The lengths of everything in a shard of R records, D documents and S sentences, in the order of the tar.

    Attributes:
        document_lengths: (D,) uint32 tokens of each document.
        sentence_counts: (D,) uint32 sentences of each document.
        sentence_lengths: (S,) uint32 tokens of each sentence.
        document_ids: (D,) uint64 xxh3_64 of each document's normalized text.
        document_sources: (D,) uint16 number of each document's source in the manifest.
        record_document_counts: (R,) uint32 documents in each record.
        token_offsets: (R,) uint64 byte offset in the tar at which the token data of each record begins.
    """

    document_lengths: np.ndarray
    sentence_counts: np.ndarray
    sentence_lengths: np.ndarray
    document_ids: np.ndarray
    document_sources: np.ndarray
    record_document_counts: np.ndarray
    token_offsets: np.ndarray


_INDEX_DTYPES = {
    "document_lengths": np.uint32,
    "sentence_counts": np.uint32,
    "sentence_lengths": np.uint32,
    "document_ids": np.uint64,
    "document_sources": np.uint16,
    "record_document_counts": np.uint32,
    "token_offsets": np.uint64,
}


def read_index(folder: str, shard: ShardRecord) -> ShardIndex:
    """Read a shard's index and check it: its sha256, its arrays among themselves, and the manifest's counts.

    Raises:
        UserError: the index is missing, damaged, or belongs to another shard.
    """
    data, where = read_file(folder, shard.index), storage.redact(storage.join(folder, shard.index.name))
    try:
        index = ShardIndex(**safetensors.numpy.load(data))
    except TENSOR_FAULTS as error:
        raise UserError(f"{where} is not the index of a shard ({error})", fix=REBUILD, code="damaged-index") from None
    problem = _index_problem(index, shard)
    if problem:
        raise UserError(f"{where} {problem}", fix=REBUILD, code="damaged-index")
    return index


def join_indexes(parts: list[ShardIndex]) -> ShardIndex:
    """Return the index of a shard that contains these parts in order."""
    return ShardIndex(
        **{
            name: np.concatenate([getattr(part, name) for part in parts] or [np.empty(0)]).astype(dtype)
            for name, dtype in _INDEX_DTYPES.items()
        }
    )


def starts_of(lengths: np.ndarray) -> np.ndarray:
    """Return the start offsets of consecutive runs of these lengths, (n,) int64, the first 0."""
    starts: np.ndarray = np.cumsum(lengths, dtype=np.int64) - lengths
    return starts


def _index_problem(index: ShardIndex, shard: ShardRecord) -> str | None:
    """Describe what is wrong with an index; None if nothing is."""
    for name, dtype in _INDEX_DTYPES.items():
        array = getattr(index, name)
        if array.dtype != dtype or array.ndim != 1:
            return f"has {name} of type {array.dtype} and {array.ndim} dimensions"
    documents, records = len(index.document_lengths), len(index.token_offsets)
    if (documents, len(index.sentence_lengths), records) != (shard.documents, shard.sentences, shard.records):
        return "counts other documents, sentences or records than the manifest"
    if len({documents, len(index.sentence_counts), len(index.document_ids), len(index.document_sources)}) > 1:
        return "has arrays of different numbers of documents"
    if len(index.record_document_counts) != records or index.record_document_counts.sum(dtype=np.int64) != documents:
        return "has records that do not add up to its documents"
    if (
        not all(getattr(index, name).all() for name in list(_INDEX_DTYPES)[:3])
        or not index.record_document_counts.all()
    ):
        return "has an empty document, sentence or record"
    if index.sentence_counts.sum(dtype=np.int64) != shard.sentences:
        return "has sentences that belong to no document"
    firsts = starts_of(index.sentence_counts)
    by_document = np.add.reduceat(index.sentence_lengths.astype(np.int64), firsts) if documents else np.empty(0)
    if not np.array_equal(by_document, index.document_lengths) or by_document.sum() != shard.tokens:
        return "has sentences that do not add up to its documents' tokens"
    if (np.diff(index.token_offsets.astype(np.int64)) <= 0).any() or (index.token_offsets >= shard.bytes).any():
        return "has byte offsets that are not increasing within the shard"
    first_documents = starts_of(index.record_document_counts)
    by_record = np.add.reduceat(by_document, first_documents) if records else np.empty(0)
    if (index.token_offsets.astype(np.int64) + 2 * by_record > shard.bytes).any():  # a token takes at least 2 bytes
        return "has records that reach beyond the end of the shard"
    return None
