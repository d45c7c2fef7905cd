"""Checking a shard set: every byte against the manifest, and every count against what the shards hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import safetensors
import safetensors.numpy

from data_prep import storage
from data_prep.errors import UserError
from data_prep.executors import run_units
from data_prep.manifest import TOKENIZER_FOLDER, Manifest, ShardRecord, SplitRecord, read_manifest
from data_prep.prepare import unigram_entropy_nats
from data_prep.progress import Progress
from data_prep.shards import SHARD_NAME, Record, ShardIndex, index_of, join_indexes, read_index, read_records
from data_prep.tokenizer import CLS_TOKEN_ID, MASK_TOKEN_ID, PAD_TOKEN_ID, SEP_TOKEN_ID, Tokenizer

_SPECIAL_TOKEN_IDS = [PAD_TOKEN_ID, CLS_TOKEN_ID, SEP_TOKEN_ID, MASK_TOKEN_ID]


@dataclass(frozen=True)
class _ShardTask:
    folder: str
    shard: ShardRecord
    num_sources: int
    vocab_size: int
    token_dtype: str


@dataclass(frozen=True)
class _ShardFindings:
    problems: tuple[str, ...]
    token_counts: np.ndarray
    source_counts: np.ndarray
    document_ids: np.ndarray


def verify_shards(folder: str, num_workers: int = 1) -> tuple[Manifest, list[str]]:
    """Check the shard set at `folder`; returns its manifest and what is wrong with it, a line each.

    Raises:
        UserError: there is no manifest that can be read.
    """
    manifest = read_manifest(folder)
    problems = [*_tokenizer_problems(folder, manifest), *_stray_files(folder, manifest)]
    token_counts: dict[str, np.ndarray] = {}
    source_counts = np.zeros((len(manifest.sources), 3), np.int64)
    ids: list[np.ndarray] = []
    total_bytes = sum(shard.bytes for split in (manifest.train, manifest.valid) for shard in split.shards)
    with Progress("verifying", total_bytes, "MB", 1e6) as progress:
        for name in ("train", "valid"):
            split = manifest.split(name)
            tasks = [_task(folder, manifest, shard) for shard in split.shards]
            token_counts[name] = np.zeros(manifest.tokenizer.vocab_size, np.int64)
            for task, findings in run_units(_check_shard, tasks, num_workers):
                problems.extend(findings.problems)
                token_counts[name] += findings.token_counts
                source_counts += findings.source_counts
                ids.append(findings.document_ids)
                progress.add(task.shard.bytes)
    if not problems:
        problems.extend(_total_problems(folder, manifest, token_counts, source_counts, np.concatenate(ids)))
    return manifest, sorted(problems)


def _task(folder: str, manifest: Manifest, shard: ShardRecord) -> _ShardTask:
    tokenizer = manifest.tokenizer
    return _ShardTask(folder, shard, len(manifest.sources), tokenizer.vocab_size, tokenizer.token_dtype)


def _check_shard(task: _ShardTask) -> _ShardFindings:
    """Check one shard and count what it holds; a damaged shard counts as empty."""
    try:
        return _count_shard(task)
    except UserError as error:
        nothing = np.zeros((task.num_sources, 3), np.int64)
        return _ShardFindings((str(error),), np.zeros(task.vocab_size, np.int64), nothing, np.empty(0, np.uint64))


def _count_shard(task: _ShardTask) -> _ShardFindings:
    url = storage.join(task.folder, task.shard.name)
    where = storage.redact(url)
    remedy = "restore it, or make the shards again"
    if not storage.exists(url):
        raise UserError(f"{where} is missing; {remedy}")
    if storage.size(url) != task.shard.bytes:
        raise UserError(f"{where} has {storage.size(url)} bytes and the manifest says {task.shard.bytes}; {remedy}")
    found = storage.sha256_of(url)
    if found != task.shard.sha256:
        raise UserError(
            f"{where} has other content: its sha256 is {found}, the manifest's {task.shard.sha256}; {remedy}"
        )
    index = read_index(task.folder, task.shard)
    token_counts = np.zeros(task.vocab_size, np.int64)
    parts: list[ShardIndex] = []
    path = storage.local_copy(url, None, task.shard.sha256)
    for key, record, offset in read_records(path):
        problem = _record_problem(record, task)
        if problem:
            raise UserError(f"{where} record {key} {problem}; make the shards again")
        token_counts += np.bincount(record.tokens, minlength=task.vocab_size)
        parts.append(index_of(record, offset))
    found_index = join_indexes(parts)
    for field in dataclasses.fields(ShardIndex):
        if not np.array_equal(getattr(index, field.name), getattr(found_index, field.name)):
            raise UserError(f"{where} and its index disagree on {field.name}; make the shards again")
    shortest = int(index.document_lengths.min(initial=np.iinfo(np.uint32).max)) if len(parts) else 0
    if shortest != task.shard.min_document_tokens:
        raise UserError(
            f"{where} has a shortest document of {shortest} tokens, not {task.shard.min_document_tokens}; {remedy}"
        )
    source_counts = np.zeros((task.num_sources, 3), np.int64)
    ones = np.ones(len(index.document_ids), np.int64)
    for column, values in enumerate((ones, index.sentence_counts, index.document_lengths)):
        np.add.at(source_counts[:, column], index.document_sources, values.astype(np.int64))
    return _ShardFindings((), token_counts, source_counts, index.document_ids)


def _record_problem(record: Record, task: _ShardTask) -> str | None:
    """What is wrong within a record, if anything."""
    if record.tokens.dtype != np.dtype(task.token_dtype):
        return f"has tokens of type {record.tokens.dtype}, not {task.token_dtype}"
    if not len(record.tokens) or not len(record.documents) == len(record.sources) == len(record.document_ids):
        return "is empty, or has arrays of different numbers of documents"
    if record.tokens.max() >= task.vocab_size or np.isin(record.tokens, _SPECIAL_TOKEN_IDS).any():
        return f"has token ids that are special or not below the vocabulary's {task.vocab_size}"
    for name, starts in (("document", record.documents), ("sentence", record.sentences)):
        rising = len(starts) and starts[0] == 0 and (np.diff(starts.astype(np.int64)) > 0).all()
        if not rising or starts[-1] >= len(record.tokens):
            return f"has {name} offsets that do not rise from 0 within its tokens"
    if not np.isin(record.documents, record.sentences).all():
        return "has a document that begins within a sentence"
    if record.sources.max() >= task.num_sources:
        return "has a document of a source that the manifest does not name"
    return None


def _tokenizer_problems(folder: str, manifest: Manifest) -> Iterator[str]:
    if storage.is_remote(folder):
        return
    place = storage.join(folder, TOKENIZER_FOLDER)
    expected = manifest.tokenizer
    try:
        tokenizer = Tokenizer.load(place)
    except UserError as error:
        yield str(error)
        return
    if tokenizer.fingerprint != expected.fingerprint:
        yield (
            f"{place} is another tokenizer: its fingerprint is {tokenizer.fingerprint} and the shards were "
            "made with "
            f"{expected.fingerprint}; copy the right one there, or make the shards again"
        )
    elif (tokenizer.vocab_size, np.dtype(tokenizer.token_dtype).name) != (
        expected.vocab_size,
        expected.token_dtype,
    ):
        yield f"{place} has {tokenizer.vocab_size} pieces and the manifest says {expected.vocab_size}; make them again"


def _stray_files(folder: str, manifest: Manifest) -> Iterator[str]:
    named = {
        name
        for split in (manifest.train, manifest.valid)
        for shard in split.shards
        for name in (shard.name, shard.index.name)
    }
    for name in storage.list_names(folder):
        if SHARD_NAME.fullmatch(name) and name not in named:
            yield f"{storage.join(folder, name)} is not in the manifest; remove it"


def _total_problems(
    folder: str,
    manifest: Manifest,
    token_counts: dict[str, np.ndarray],
    source_counts: np.ndarray,
    ids: np.ndarray,
) -> Iterator[str]:
    """Compare the sums of sound shards with the totals that the manifest gives."""
    place = storage.join(folder, manifest.token_counts.name)
    if not storage.exists(place) or storage.sha256_of(place) != manifest.token_counts.sha256:
        where = storage.redact(place)
        yield f"{where} is missing or has other content than the manifest says; restore it, or make it again"
    else:
        yield from _count_problems(place, token_counts)
    for name in ("train", "valid"):
        yield from _split_problems(name, manifest.split(name), token_counts[name])
    for source, found in zip(manifest.sources, source_counts.tolist(), strict=True):
        if [source.documents, source.sentences, source.tokens] != found:
            yield f"source {source.name} has {found} documents, sentences and tokens, not what the manifest says"
    if len(np.unique(ids)) != len(ids):
        yield f"{storage.redact(folder)} holds {len(ids) - len(np.unique(ids))} documents twice; make the shards again"


def _count_problems(place: str, token_counts: dict[str, np.ndarray]) -> Iterator[str]:
    where = storage.redact(place)
    try:
        stored = safetensors.numpy.load(storage.read_bytes(place))
    except safetensors.SafetensorError as error:
        yield f"{where} is damaged ({error}); make the shards again"
        return
    for name, counts in token_counts.items():
        if name not in stored or not np.array_equal(stored[name], counts):
            yield f"{where} counts other {name} tokens than the shards hold; make the shards again"


def _split_problems(name: str, split: SplitRecord, token_counts: np.ndarray) -> Iterator[str]:
    for field in ("documents", "sentences", "tokens"):
        total = sum(getattr(shard, field) for shard in split.shards)
        if total != getattr(split, field):
            yield f"the manifest counts {getattr(split, field)} {name} {field} and its shards hold {total}"
    if split.unigram_entropy_nats != unigram_entropy_nats(token_counts):
        yield f"the manifest's unigram entropy of {name} is not that of its tokens"
