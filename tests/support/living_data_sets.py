"""Data sets of named sources that tests add to, remove from and verify, and what they and their shards hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from data_prep import UserError, verify
from data_prep.dataset.manifest import Manifest, read_manifest
from data_prep.dataset.removal import remove_documents
from data_prep.dataset.removal_request import RemovalRequest
from data_prep.dataset.shards import Record, read_records
from data_prep.executors.executors import Executor
from tests.support.preparations import prepared, write_texts

Contents = Counter[tuple[str, str, int, tuple[int, ...], tuple[int, ...]]]
"""Split, source, id, tokens and sentence starts of every document."""


def make_data_set(
    folder: Path,
    texts: Mapping[str, Sequence[str]],
    tokenizer_folder: Path,
    *,
    add: bool = False,
    fresh: bool = False,
    inputs: Path | None = None,
    **settings: Any,
) -> Manifest:
    """Make a data set of these sources, or add them to the one in `folder`; the texts lie in the folder `inputs`."""
    inputs = inputs or folder.parent / f"{folder.name}-inputs"
    inputs.mkdir(parents=True, exist_ok=True)
    sources = {}
    for name, lines in texts.items():
        path = inputs / f"{name}.jsonl"
        if not path.exists():  # written again it would be another input
            write_texts(path, lines)
        sources[name] = {"input": path, "license": "CC0-1.0"}
    settings = {"shards": {"min_shards": 3, "valid_fraction": 0.2, "record_tokens": 1500}, **settings}
    return prepared(sources, tokenizer_folder, folder, fresh=fresh, add=add, **settings)


def contents(folder: Path, digest: str | None = None) -> Contents:
    """What a version of the data set holds, read record by record."""
    manifest = read_manifest(str(folder), digest)
    names = [source.name for source in manifest.sources]
    found: Contents = Counter()
    for shard in manifest.shards:
        split = shard.name.partition("-")[0]
        for record in records_of(folder / shard.name):
            stops = [*record.documents[1:].tolist(), len(record.tokens)]
            columns = (record.documents.tolist(), stops, record.sources.tolist(), record.document_ids.tolist())
            for start, stop, source, document in zip(*columns, strict=True):
                sentences = record.sentences[(record.sentences >= start) & (record.sentences < stop)].astype(np.int64)
                tokens = tuple(record.tokens[start:stop].tolist())
                found[(split, names[source], document, tokens, tuple((sentences - start).tolist()))] += 1
    return found


def remove(
    folder: str | Path,
    *,
    source: str | None = None,
    ids: ArrayLike | None = None,
    executor: Executor | int = 1,
    fresh: bool = False,
    **request: Any,
) -> tuple[Manifest, bool]:
    """Remove a source or documents; returns what `remove_documents` does."""
    wanted = RemovalRequest(source, None if ids is None else np.unique(np.asarray(ids, np.uint64)), **request)
    return remove_documents(str(folder), wanted, executor, fresh)


def records_by_key(shard: str | Path) -> dict[str, Record]:
    return {key: record for key, record, _ in read_records(shard)}


def records_of(shard: str | Path) -> list[Record]:
    return list(records_by_key(shard).values())


def problems_of(folder: str | Path, version: str | None = None) -> list[str]:
    """What `verify` finds in a data set."""
    try:
        verify(folder, version)
    except UserError as error:
        if error.code != "damaged-data-set":
            raise
        return list(error.problems)
    return []


def document_ids(folder: Path, source: str | None = None) -> list[int]:
    """Ids of all documents, or of a source's, rising."""
    return sorted(document for _, name, document, _, _ in contents(folder) if source in (None, name))


def file_bytes(folder: Path) -> dict[str, bytes]:
    """The files that lie in the folder itself."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
