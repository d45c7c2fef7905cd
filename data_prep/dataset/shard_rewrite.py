"""Rewrite of a shard and its provenance sidecar without some documents, which are counted; nothing is tokenized."""

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
from data_prep.dataset.manifest_records import FileRecord, ShardRecord, TokenizerRecord
from data_prep.dataset.provenance_sidecar import rewrite_provenance
from data_prep.dataset.shards import Record, read_records, starts_of, write_shard
from data_prep.dataset.versions import REMOVAL_WORK
from data_prep.storage import storage
from data_prep.storage.work_files import read_state, write_state


@dataclass(frozen=True)
class RewriteTask:
    """A unit of work that runs anywhere: a shard or a sidecar, and what to leave out.

    Attributes:
        shard: None for a sidecar whose shard holds no document.
        provenance: the sidecar to rewrite; None to keep it, or if there is none.
        name: name of the new shard, such as train-000007.
        gone: (n,) int64 numbers of the documents to leave out, ascending; empty to keep the shard.
        gone_ids: (m,) uint64 ids of all documents that the removal takes out of the data set.
        gone_source: the source that the removal takes out.
    """

    folder: str
    shard: ShardRecord | None
    provenance: FileRecord | None
    name: str
    gone: np.ndarray
    gone_ids: np.ndarray
    gone_source: str | None
    tokenizer: TokenizerRecord
    num_sources: int

    @property
    def bytes(self) -> int:
        """Bytes of the files to rewrite."""
        shard = self.shard.bytes if self.shard is not None and len(self.gone) else 0
        return shard + (0 if self.provenance is None else self.provenance.bytes)


@dataclass(frozen=True)
class RewriteResult:
    """A finished unit.

    Attributes:
        shard: with its sidecar; None if no document is left.
        detached: the sidecar of a shard that holds no document; None if there is none.
        token_counts: (vocab_size,) int64 of the documents taken out.
        source_counts: (num_sources, 5) int64 of the documents taken out, in the order of `SOURCE_COLUMNS`.
    """

    shard: ShardRecord | None
    detached: FileRecord | None
    token_counts: np.ndarray
    source_counts: np.ndarray


def result_url(task: RewriteTask) -> str:
    """Return where the unit writes its result."""
    return storage.join(storage.join(task.folder, REMOVAL_WORK), f"{task.name}.done.json")


def read_result(task: RewriteTask) -> RewriteResult:
    """Read the result of a finished unit."""
    values = read_state(result_url(task))
    detached = values.get("detached")
    return RewriteResult(
        shard=None if values["shard"] is None else ShardRecord.model_validate(values["shard"]),
        detached=None if detached is None else FileRecord.model_validate(detached),
        token_counts=np.array(values["token_counts"], np.int64),
        source_counts=np.array(values["source_counts"], np.int64).reshape(task.num_sources, len(SOURCE_COLUMNS)),
    )


def rewrite_shard(task: RewriteTask) -> None:
    """Write the shard and its sidecar without the documents to leave out, then the result."""
    text = piece_text(storage.join(task.folder, TOKENIZER_FOLDER), task.tokenizer.fingerprint)
    counts = RecordCounts(task.tokenizer.vocab_size, task.num_sources, text)
    shard = task.shard
    if task.shard is not None and len(task.gone):
        with tempfile.TemporaryDirectory(prefix="clozeworks-") as cache:
            records = _kept_records(_sound_copy(task, task.shard, Path(cache)), task.gone, counts)
            first = next(records, None)
            shard = None if first is None else write_shard(task.folder, task.name, itertools.chain([first], records))
    sidecar = None if task.shard is None else task.shard.provenance
    if task.provenance is not None:
        sidecar = rewrite_provenance(task.folder, task.provenance, task.name, task.gone_ids, task.gone_source)
    if shard is not None and task.shard is not None:
        shard = shard.model_copy(update={"source": task.shard.source, "provenance": sidecar})
    result = {
        "shard": None if shard is None else shard.model_dump(mode="json"),
        "detached": sidecar.model_dump(mode="json") if shard is None and sidecar is not None else None,
        "token_counts": counts.by_token.tolist(),
        "source_counts": counts.by_source.tolist(),
    }
    write_state(result_url(task), result)


def _sound_copy(task: RewriteTask, shard: ShardRecord, cache: Path) -> Path:
    """Return a local path of the shard after checking its sha256."""
    url = storage.join(task.folder, shard.name)
    path = storage.local_copy(url, cache, shard.sha256)
    if (found := storage.sha256_of(path)) != shard.sha256:
        raise UserError(
            f"{storage.redact(url)} has sha256 {found}, and the manifest names {shard.sha256}",
            fix="restore it, and rerun the same command",
            code="checksum-mismatch",
        )
    return path


def _kept_records(path: Path, gone: np.ndarray, counts: RecordCounts) -> Iterator[Record]:
    """Yield the records without the documents to leave out, which are counted; skip records that become empty."""
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
    """Return a record of some of the documents, chosen by (D,) bool."""
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
