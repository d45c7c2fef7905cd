"""What is asked to be removed from a data set, and where it lies: found in the indexes, no shard is read."""

from __future__ import annotations

import hashlib
import io
import re
from dataclasses import dataclass

import numpy as np

from data_prep.base.errors import UserError
from data_prep.base.progress import Progress
from data_prep.dataset.addition import removed_ids
from data_prep.dataset.manifest import Manifest
from data_prep.dataset.manifest_records import ShardRecord
from data_prep.dataset.shard_index import read_index
from data_prep.storage import storage

_ID = re.compile("[0-9a-fA-F]{16}")
_SHOWN = 5


@dataclass(frozen=True)
class RemovalRequest:
    """A source by its name, or documents by their ids.

    Attributes:
        ids: (n,) uint64, rising, each once.
        note: what the manifest is to say of it.
    """

    source: str | None = None
    ids: np.ndarray | None = None
    note: str | None = None

    def __post_init__(self) -> None:
        assert (self.source is None) != (self.ids is None)

    @property
    def description(self) -> dict[str, str | None]:
        """Plain values that are equal where the same documents are meant."""
        return {
            "source": self.source,
            "ids_sha256": None if self.ids is None else hashlib.sha256(self.ids.tobytes()).hexdigest(),
        }

    def __str__(self) -> str:
        return f"source {self.source!r}" if self.ids is None else f"{len(self.ids):,} documents by id"


@dataclass(frozen=True)
class Found:
    """The documents of a shard that a request means.

    Attributes:
        numbers: (n,) int64 numbers of the documents in the shard, rising.
        num_tokens: of these documents.
    """

    shard: ShardRecord
    numbers: np.ndarray
    num_tokens: int


def read_document_ids(url: str) -> np.ndarray:
    """Read a file of ids, 16 hexadecimal digits a line as `inspect` shows them; # begins a comment.

    Returns (n,) uint64, rising, each once.

    Raises:
        UserError: a line is something else, or there is no id.
    """
    where = storage.redact(url)
    if not storage.exists(url):
        raise UserError(f"{where} is missing; name a file of ids of documents, 16 hexadecimal digits a line")
    try:
        text = storage.read_bytes(url).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{where} is no text file; give ids of documents, 16 hexadecimal digits a line") from None
    ids: list[int] = []
    for number, line in enumerate(io.StringIO(text, newline=None), 1):
        word = line.partition("#")[0].strip()
        if word and not _ID.fullmatch(word):
            raise UserError(
                f"{where} line {number} is no id of a document: {word[:40]!r}; give the 16 hexadecimal digits that "
                "'inspect' shows, such as 00f3a9c2d4e5b617, and behind # what you like"
            )
        if word:
            ids.append(int(word, 16))
    if not ids:
        raise UserError(f"{where} holds no id of a document; give one a line, as 'inspect' shows them")
    return np.unique(np.array(ids, np.uint64))


def find_documents(folder: str, manifest: Manifest, request: RemovalRequest) -> list[Found] | None:
    """The documents that the request means, by shard, in the manifest's order; None where it was removed before.

    Raises:
        UserError: there is no such source, ids are unknown (the message names them), or an index is damaged.
    """
    if request.source is not None:
        number = _source_number(folder, manifest, request.source)
        return None if request.source in manifest.removed_sources else _search(folder, manifest, number, None)
    assert request.ids is not None
    wanted = np.setdiff1d(request.ids, removed_ids(folder, manifest), assume_unique=True)
    return _search(folder, manifest, None, wanted) if len(wanted) else None


def _source_number(folder: str, manifest: Manifest, name: str) -> int:
    names = [source.name for source in manifest.sources]
    if name not in names:
        known = ", ".join(repr(source.name) for source in manifest.sources if source.documents)
        raise UserError(f"{storage.redact(folder)} has no source {name!r}; its sources are {known}")
    return names.index(name)


def _search(folder: str, manifest: Manifest, source: int | None, ids: np.ndarray | None) -> list[Found]:
    found: list[Found] = []
    met = np.zeros(0 if ids is None else len(ids), bool)
    shards = manifest.shards
    with Progress("searching indexes", sum(shard.index.bytes for shard in shards), "MB", 1e6) as progress:
        for shard in shards:
            index = read_index(folder, shard)
            if ids is None:
                mine = index.document_sources == source
            else:
                places = np.minimum(np.searchsorted(ids, index.document_ids), len(ids) - 1)
                mine = ids[places] == index.document_ids
                met[places[mine]] = True
            if mine.any():
                num_tokens = int(index.document_lengths[mine].sum(dtype=np.int64))
                found.append(Found(shard, np.flatnonzero(mine), num_tokens))
            progress.add(shard.index.bytes)
    if ids is not None and not met.all():
        raise UserError(_unknown(folder, ids[~met]))
    return found


def _unknown(folder: str, ids: np.ndarray) -> str:
    shown = ", ".join(f"{document:016x}" for document in ids[:_SHOWN].tolist())
    return (
        f"{storage.redact(folder)} holds no document {shown}{' ...' if len(ids) > _SHOWN else ''} "
        f"({len(ids):,} unknown ids); 'inspect' shows ids, the xxh3_64 of a normalized text; take out of the file what "
        "is of another data set"
    )
