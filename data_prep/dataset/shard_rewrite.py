"""Rewriting a shard without some of its documents, and counting what was taken out; nothing is tokenized again."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.base.errors import UserError
from data_prep.dataset.counts import SOURCE_COLUMNS, RecordCounts, piece_text
from data_prep.dataset.manifest import TOKENIZER_FOLDER
from data_prep.dataset.manifest_records import ShardRecord, TokenizerRecord
from data_prep.dataset.shard_index import starts_of
from data_prep.dataset.shards import Record, read_records, write_shard
from data_prep.dataset.state_files import read_state, write_state
from data_prep.dataset.versions import REMOVAL_WORK
from data_prep.storage import storage


@dataclass(frozen=True)
class RewriteTask:
    """A unit of work: a shard, and the documents of it to leave out, with all it needs to be done anywhere.

    Attributes:
        name: of the new shard, such as train-000007.
        gone: (n,) int64 numbers of the documents in the shard, rising.
    """

    folder: str
    shard: ShardRecord
    name: str
    gone: np.ndarray
    tokenizer: TokenizerRecord
    num_sources: int


@dataclass(frozen=True)
class RewriteResult:
    """A finished unit.

    Attributes:
        shard: None where no document is left of it.
        token_counts: (vocab_size,) int64 of what was taken out.
        source_counts: (num_sources, 5) int64 of what was taken out, in the order of `SOURCE_COLUMNS`.
    """

    shard: ShardRecord | None
    token_counts: np.ndarray
    source_counts: np.ndarray


def result_url(task: RewriteTask) -> str:
    """Where the mark that the unit is done lies."""
    return storage.join(storage.join(task.folder, REMOVAL_WORK), f"{task.name}.done.json")


def read_result(task: RewriteTask) -> RewriteResult:
    """The result that a finished unit left."""
    values = read_state(result_url(task))
    return RewriteResult(
        shard=None if values["shard"] is None else ShardRecord.model_validate(values["shard"]),
        token_counts=np.array(values["token_counts"], np.int64),
        source_counts=np.array(values["source_counts"], np.int64).reshape(task.num_sources, len(SOURCE_COLUMNS)),
    )


def rewrite_shard(task: RewriteTask) -> None:
    """Write the shard without the documents to leave out, then the mark that it is done.

    Raises:
        UserError: the shard or the data set's tokenizer is damaged.
    """
    text = piece_text(storage.join(task.folder, TOKENIZER_FOLDER), task.tokenizer.fingerprint)
    counts = RecordCounts(task.tokenizer.vocab_size, task.num_sources, text)
    with tempfile.TemporaryDirectory(prefix="clozeworks-") as cache:
        records = _kept_records(_sound_copy(task, Path(cache)), task.gone, counts)
        first = next(records, None)
        shard = None if first is None else write_shard(task.folder, task.name, itertools.chain([first], records))
    described = None if shard is None else shard.model_dump(mode="json")
    result = {"shard": described, "token_counts": counts.by_token.tolist(), "source_counts": counts.by_source.tolist()}
    write_state(result_url(task), result)


def _sound_copy(task: RewriteTask, cache: Path) -> Path:
    """A local path of the shard, whose bytes are those that the manifest names."""
    url = storage.join(task.folder, task.shard.name)
    path = storage.local_copy(url, cache, task.shard.sha256)
    if storage.sha256_of(path) != task.shard.sha256:
        raise UserError(
            f"{storage.redact(url)} is damaged: its sha256 is not the manifest's, so nothing is made of it; restore it "
            "and run the same command again"
        )
    return path


def _kept_records(path: Path, gone: np.ndarray, counts: RecordCounts) -> Iterator[Record]:
    """The records without the documents that go, which are counted; a record of which nothing is left is left out."""
    first = 0
    for _, record, _ in read_records(path):
        keep = np.ones(len(record.documents), bool)
        start, stop = np.searchsorted(gone, (first, first + len(keep)))
        keep[gone[start:stop] - first] = False
        first += len(keep)
        if not keep.all():
            counts.add(_chosen(record, ~keep))
        if keep.any():
            yield _chosen(record, keep)


def _chosen(record: Record, chosen: np.ndarray) -> Record:
    """A record of some of the documents, chosen by (D,) bool."""
    if chosen.all():
        return record
    starts = record.documents.astype(np.int64)
    lengths = np.diff(starts, append=len(record.tokens))
    document_of_sentence = np.searchsorted(starts, record.sentences, side="right") - 1
    sentence_lengths = np.diff(record.sentences.astype(np.int64), append=len(record.tokens))
    return Record(
        tokens=record.tokens[np.repeat(chosen, lengths)],
        documents=starts_of(lengths[chosen]).astype(np.uint32),
        sentences=starts_of(sentence_lengths[chosen[document_of_sentence]]).astype(np.uint32),
        sources=record.sources[chosen],
        document_ids=record.document_ids[chosen],
    )
