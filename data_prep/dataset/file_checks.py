"""Checks of single files of a data set: sizes and sha256, a shard against its index, a sidecar against its shard.

Each is a unit of work that runs in any process; `verification.py` puts the findings together.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.base.errors import UserError
from data_prep.dataset.counts import RecordCounts, piece_text
from data_prep.dataset.manifest import Manifest
from data_prep.dataset.manifest_records import REBUILD, FileRecord, ShardRecord, TokenizerRecord
from data_prep.dataset.provenance_sidecar import read_provenance, rows_to_remove
from data_prep.dataset.safeguards import filter_list_files
from data_prep.dataset.shards import Record, ShardIndex, index_of, join_indexes, read_index, read_records
from data_prep.storage import storage

_FOREIGN_SHARE = 0.01  # share of the tokens; fewer unknown ids are damage


@dataclass(frozen=True)
class CheckTask:
    """A shard to check.

    Attributes:
        tokenizer_url: of the tokenizer that made its ids; without it words and bytes of text are not counted.
    """

    folder: str
    shard: ShardRecord
    num_sources: int
    tokenizer: TokenizerRecord
    tokenizer_url: str | None


@dataclass(frozen=True)
class Findings:
    """Findings of the check of a shard.

    Attributes:
        problem: None if it is sound; a damaged shard counts as empty.
        token_counts: (vocab_size,) int64.
        source_counts: (num_sources, 5) int64, in the order of `SOURCE_COLUMNS`.
        document_ids: (num_documents,) uint64, in the shard's order.
    """

    problem: str | None
    token_counts: np.ndarray
    source_counts: np.ndarray
    document_ids: np.ndarray


def check_shard(task: CheckTask) -> Findings:
    """Read the whole shard and its index."""
    text = None
    if task.tokenizer_url is not None:
        text = piece_text(task.tokenizer_url, task.tokenizer.fingerprint)
    counts = RecordCounts(task.tokenizer.vocab_size, task.num_sources, text)
    try:
        with tempfile.TemporaryDirectory(prefix="clozeworks-") as cache:
            index = read_index(task.folder, task.shard)
            _check_records(task, _sound_copy(task, index, Path(cache)), index, counts)
    except UserError as error:
        nothing = RecordCounts(task.tokenizer.vocab_size, task.num_sources, None)
        return Findings(str(error), nothing.by_token, nothing.by_source, np.empty(0, np.uint64))
    return Findings(None, counts.by_token, counts.by_source, index.document_ids)


def _sound_copy(task: CheckTask, index: ShardIndex, cache: Path) -> Path:
    """Return a local path of the shard after comparing its bytes with the manifest."""
    url = storage.join(task.folder, task.shard.name)
    where = storage.redact(url)
    if not storage.exists(url):
        raise UserError(f"{where} is missing", fix=REBUILD, code="missing-data-file")
    found = storage.size(url)
    if storage.is_remote(url) and found == task.shard.bytes:
        return storage.local_copy(url, cache, task.shard.sha256)  # hashes what it downloads
    if found != task.shard.bytes:
        what = f"has {found} bytes and the manifest says {task.shard.bytes}"
    else:
        sha256 = storage.sha256_of(url)
        if sha256 == task.shard.sha256:
            return storage.local_path(url)
        what = f"has other content: its sha256 is {sha256}, the manifest's {task.shard.sha256}"
    reason = "" if storage.is_remote(url) else f" ({_diagnosis(task, storage.local_path(url), index)})"
    raise UserError(f"{where} {what}{reason}", fix=REBUILD, code="checksum-mismatch")


def _diagnosis(task: CheckTask, path: Path, index: ShardIndex) -> str:
    """Describe the damage of a shard whose bytes differ from the manifest."""
    ids: list[np.ndarray] = []
    num_foreign = num_tokens = 0
    try:
        for _, record, _ in read_records(path):
            is_other_type = record.tokens.dtype != np.dtype(task.tokenizer.token_dtype)
            num_foreign += len(record.tokens) if is_other_type else _num_foreign(record, task)
            num_tokens += len(record.tokens)
            ids.append(record.document_ids)
    except UserError:
        return "it cannot be read to its end: it was cut off or overwritten"
    if num_foreign > _FOREIGN_SHARE * num_tokens:
        return "it is a shard of another tokenizer: it holds ids that this one has not"
    if not np.isin(np.concatenate([np.empty(0, np.uint64), *ids]), index.document_ids).any():
        return "it is a whole shard of other documents: another shard, or one of another data set"
    return "it is this shard with some bytes changed"


def _check_records(task: CheckTask, path: Path, index: ShardIndex, counts: RecordCounts) -> None:
    where = storage.redact(storage.join(task.folder, task.shard.name))
    parts: list[ShardIndex] = []
    for key, record, offset in read_records(path):
        problem = record_problem(record, task)
        if problem:
            raise UserError(f"{where} record {key} {problem}", fix=REBUILD, code="damaged-shard")
        counts.add(record)
        parts.append(index_of(record, offset))
    found_index = join_indexes(parts)
    for field in dataclasses.fields(ShardIndex):
        if not np.array_equal(getattr(index, field.name), getattr(found_index, field.name)):
            raise UserError(f"{where} and its index disagree on {field.name}", fix=REBUILD, code="damaged-index")
    shortest = int(index.document_lengths.min(initial=np.iinfo(np.uint32).max)) if parts else 0
    if shortest != task.shard.min_document_tokens:
        raise UserError(
            f"{where} has a shortest document of {shortest} tokens, not {task.shard.min_document_tokens}",
            fix=REBUILD,
            code="damaged-index",
        )


def record_problem(record: Record, task: CheckTask) -> str | None:
    """Describe what is wrong within a record; None if nothing is."""
    if not len(record.tokens) or not len(record.documents) == len(record.sources) == len(record.document_ids):
        return "is empty, or has arrays of different numbers of documents"
    problem = _token_problem(record, task)
    if problem is not None:
        return problem
    for name, starts in (("document", record.documents), ("sentence", record.sentences)):
        rising = len(starts) and starts[0] == 0 and (np.diff(starts.astype(np.int64)) > 0).all()
        if not rising or starts[-1] >= len(record.tokens):
            return f"has {name} offsets that do not rise from 0 within its tokens"
    if not np.isin(record.documents, record.sentences).all():
        return "has a document that begins within a sentence"
    if record.sources.max() >= task.num_sources:
        return "has a document of a source that the manifest does not name"
    return None


def _token_problem(record: Record, task: CheckTask) -> str | None:
    tokenizer = task.tokenizer
    if record.tokens.dtype != np.dtype(tokenizer.token_dtype):
        return f"has tokens of type {record.tokens.dtype}, not {tokenizer.token_dtype}"
    if _num_foreign(record, task):
        return f"has token ids that are special or not below the vocabulary's {tokenizer.vocab_size}"
    return None


def _num_foreign(record: Record, task: CheckTask) -> int:
    """Return how many token ids are special tokens or outside the vocabulary."""
    is_foreign = record.tokens >= task.tokenizer.vocab_size
    return int((is_foreign | np.isin(record.tokens, task.tokenizer.special_tokens.never_in_text)).sum())


@dataclass(frozen=True)
class FileTask:
    """A file to check, in the folder of a data set."""

    folder: str
    file: FileRecord


def file_tasks(folder: str, manifest: Manifest) -> list[FileTask]:
    """Return all shards, their indexes, the token counts, the sidecars, the lists of inputs and of filters."""
    files = [file for shard in manifest.shards for file in (shard, shard.index)]
    files += [manifest.token_counts, *manifest.provenance_files, *manifest.input_files, *filter_list_files(manifest)]
    return [FileTask(folder, file) for file in files]


def size_problems(tasks: Sequence[FileTask]) -> list[str]:
    """Return one line for every file that is missing or has another size; no content is read."""
    return [problem for problem in storage.map_at_once(_size_problem, tasks) if problem is not None]


def _size_problem(task: FileTask) -> str | None:
    """Describe what is wrong with the file's size; None if nothing is."""
    url = storage.join(task.folder, task.file.name)
    if not storage.exists(url):
        return f"{task.file.name} is missing"
    found = storage.size(url)
    return None if found == task.file.bytes else f"{task.file.name} has {found} bytes instead of {task.file.bytes}"


@dataclass(frozen=True)
class SidecarTask:
    """A sidecar to check.

    Attributes:
        shard_ids: (n,) uint64 ids of the documents of its shard, any order; empty for a detached sidecar.
        removed_ids: (m,) uint64 ids of removed documents.
        removed_sources: names of removed sources.
        source_names: names of all sources of the manifest.
    """

    folder: str
    file: FileRecord
    shard_ids: np.ndarray
    removed_ids: np.ndarray
    removed_sources: tuple[str, ...]
    source_names: tuple[str, ...]


@dataclass(frozen=True)
class SidecarFindings:
    """Problems of a sidecar, and the ids (k,) uint64 that must be in the data set."""

    problems: tuple[str, ...]
    kept_ids: np.ndarray


def check_sidecar(task: SidecarTask) -> SidecarFindings:
    """Read the whole sidecar and compare it."""
    try:
        table = read_provenance(task.folder, task.file)
    except UserError as error:
        return SidecarFindings((str(error),), np.empty(0, np.uint64))
    document_ids = table["document_id"].to_numpy().astype(np.uint64)
    kept_ids = np.unique(table["kept_as"].drop_null().to_numpy().astype(np.uint64))
    removed = int(rows_to_remove(table, task.removed_ids).sum())
    sources = set(table["source"].unique().to_pylist())
    problems = _problems(task, len(np.setdiff1d(task.shard_ids, document_ids)), removed, sources)
    return SidecarFindings(tuple(problems), kept_ids)


def _problems(task: SidecarTask, num_missing: int, num_removed: int, sources: set[str]) -> Iterator[str]:
    where = storage.redact(storage.join(task.folder, task.file.name))
    if num_missing:
        yield f"{where} has no row for {num_missing} documents of its shard. Fix: restore it, or rebuild the data set"
    if num_removed:
        yield f"{where} has {num_removed} rows of removed documents. Fix: restore it, or rebuild the data set"
    for name in sorted(sources & set(task.removed_sources)):
        yield f"{where} has rows of the removed source {name!r}. Fix: restore it, or rebuild the data set"
    for name in sorted(sources - set(task.source_names)):
        yield f"{where} has rows of source {name!r}, which the manifest does not name. Fix: rebuild the data set"
