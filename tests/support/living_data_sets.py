"""Data sets of named sources that tests add to, remove from and verify, and what they and their shards hold."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from data_prep import UserError, open_dataset, verify
from data_prep.dataset.manifest import Manifest, write_manifest
from data_prep.dataset.manifest_records import FileRecord as FileRecord
from data_prep.dataset.manifest_records import RemovalRecord as RemovalRecord
from data_prep.dataset.manifest_records import ShardRecord as ShardRecord
from data_prep.dataset.removal import remove_documents
from data_prep.dataset.removal_request import RemovalRequest
from data_prep.dataset.shards import Record as Record
from data_prep.dataset.shards import ShardIndex as ShardIndex
from data_prep.dataset.shards import read_index as read_index
from data_prep.dataset.shards import read_records as read_records
from data_prep.dataset.shards import starts_of as starts_of
from data_prep.dataset.shards import write_shard as write_shard
from data_prep.executors.executors import Executor
from tests.support.preparations import prepared, write_texts

Contents = Counter[tuple[str, str, int, tuple[int, ...], tuple[int, ...]]]
"""Split, source, id, tokens and sentence starts of every document."""
NO_FILE = {"name": "token_counts.safetensors", "bytes": 0, "sha256": "0" * 64}


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


def write_data_set(folder: Path, records: Mapping[str, Sequence[Sequence[Record]]], **values: Any) -> Manifest:
    """Write the records of each shard of `train` and `valid` as they are, and a manifest that vouches for them.

    Args:
        values: what its manifest has instead of no sources, inputs and token counts, and a vocabulary of 8,192.
    """
    splits = {}
    for split in ("train", "valid"):
        shards = [
            write_shard(str(folder), f"{split}-{number:06d}", blocks)
            for number, blocks in enumerate(records.get(split, ()))
        ]
        counts = {name: sum(getattr(shard, name) for shard in shards) for name in ("documents", "sentences", "tokens")}
        splits[split] = {"shards": shards, "unigram_entropy_nats": None, **counts}
    tokenizer = {"fingerprint": "0" * 64, "vocab_size": 8192, "token_dtype": "uint16"}
    nothing = {"config": {}, "inputs": (), "sources": (), "tokenizer": tokenizer, "token_counts": NO_FILE}
    manifest = Manifest.model_validate({"format_version": 2, "clozeworks_version": "0", **nothing, **splits, **values})
    write_manifest(str(folder), manifest)
    return manifest


def change_manifest(folder: str | Path, **changes: Any) -> None:
    """Write the manifest with other values, as if this project had written it so."""
    write_manifest(str(folder), open_dataset(folder).manifest.model_copy(update=changes))


def forge_shard(folder: Path, number: int, change: Callable[[Record], Record]) -> None:
    """Rewrite a train shard from changed records, with a manifest that vouches for it."""
    train = open_dataset(folder).manifest.train
    name = train.shards[number].name
    shard = write_shard(str(folder), name.removesuffix(".tar"), list(map(change, records_of(folder / name))))
    values = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    values["train"]["shards"][number] = shard.model_dump(mode="json")
    (folder / "manifest.json").write_text(json.dumps(values), encoding="utf-8")


def contents(folder: Path, digest: str | None = None) -> Contents:
    """What a version of the data set holds, read record by record."""
    manifest = open_dataset(folder, digest).manifest
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
