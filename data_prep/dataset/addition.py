"""Additions to a data set: its documents, its removed documents, and the version with the added documents."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from data_prep.base.errors import UsageError, UserError
from data_prep.dataset.counts import read_tensors, read_token_counts, split_record, token_counts_file
from data_prep.dataset.manifest import ADDITIONS, Manifest
from data_prep.dataset.manifest_records import FileRecord, ShardRecord
from data_prep.dataset.shard_index import read_index
from data_prep.dataset.versions import next_version, publish
from data_prep.storage import storage

REMOVED_IDS = "document_ids"


def check_source_names(parent: Manifest, names: Collection[str]) -> None:
    """Refuse sources whose names the data set has or had.

    Raises:
        UsageError: names the first one.
    """
    for name in sorted(set(names) & {source.name for source in parent.sources}):
        state = "was removed from the data set" if name in parent.removed_sources else "is in the data set already"
        raise UsageError(
            f"a source with the name {name!r} {state}",
            fix="give the added source another name",
            code="source-name-taken",
        )


def known_ids(folder: str, shards: Iterable[ShardRecord]) -> np.ndarray:
    """Return the ids of all documents of these shards, (num_documents,) uint64, ascending; 8 bytes per document.

    Raises:
        UserError: an index is missing or damaged.
    """
    ids = np.empty(0, np.uint64)
    for shard in shards:
        found = read_index(folder, shard).document_ids
        filled = len(ids)
        ids.resize(filled + len(found), refcheck=False)  # in place: a count in the manifest must not allocate memory
        ids[filled:] = found
    ids.sort()
    return ids


def removed_ids(folder: str, manifest: Manifest) -> np.ndarray:
    """Return the ids of the documents that were removed by id, (n,) uint64, ascending and unique.

    Raises:
        UserError: a file of them is missing or damaged.
    """
    files = [removal.ids for removal in manifest.removals if removal.ids is not None]
    parts = [_removed_ids_in(folder, file) for file in files]
    return np.unique(np.concatenate([np.empty(0, np.uint64), *parts]))


def _removed_ids_in(folder: str, file: FileRecord) -> np.ndarray:
    found = read_tensors(folder, file).get(REMOVED_IDS)
    if found is None or found.ndim != 1 or found.dtype != np.uint64:
        where = storage.redact(storage.join(folder, file.name))
        raise UserError(
            f"{where} holds no ids of documents", fix="restore it, or make the shards again", code="damaged-removed-ids"
        )
    return found


def grow(parent: Manifest, addition: Manifest, token_counts: Mapping[str, np.ndarray]) -> Manifest:
    """Return the version with the documents of the parent and of the addition.

    Args:
        addition: the manifest of the added documents alone; the numbers of its shards and sources continue the
            parent's.
        token_counts: of train and valid, (vocab_size,) int64, of parent and addition together.

    Raises:
        UsageError: the addition has a source of the parent's name.
    """
    check_source_names(parent, [source.name for source in addition.sources])
    assert addition.tokenizer == parent.tokenizer
    assert not {shard.name for shard in parent.shards} & {shard.name for shard in addition.shards}
    version = next_version(parent)
    return Manifest(
        format_version=addition.format_version,
        clozeworks_version=addition.clozeworks_version,
        tokenizer=parent.tokenizer,
        config={**parent.config, ADDITIONS: [*parent.preparations[1:], addition.config]},
        inputs=parent.inputs + addition.inputs,
        sources=parent.sources + addition.sources,
        train=split_record(parent.train.shards + addition.train.shards, token_counts["train"]),
        valid=split_record(parent.valid.shards + addition.valid.shards, token_counts["valid"]),
        token_counts=token_counts_file(token_counts, version)[0],
        version=version,
        parent=parent.digest,
        removals=parent.removals,
        detached_provenance=parent.detached_provenance + addition.detached_provenance,
    )


def publish_addition(
    folder: str, parent: Manifest, addition: Manifest, added_counts: Mapping[str, np.ndarray]
) -> Manifest:
    """Make the extended data set the current version of `folder`; the shards of the addition exist already.

    Args:
        added_counts: of train and of valid, (vocab_size,) int64, of the addition alone.

    Raises:
        UserError: the parent's token counts are damaged, or the folder was changed meanwhile.
    """
    before = read_token_counts(folder, parent)
    total = {name: before[name] + added_counts[name] for name in ("train", "valid")}
    manifest = grow(parent, addition, total)
    record, data = token_counts_file(total, manifest.version)
    storage.write_bytes(storage.join(folder, record.name), data)
    publish(folder, manifest)
    return manifest


def config_of_source(manifest: Manifest, name: str) -> dict[str, Any] | None:
    """Return the settings of the preparation that added a source; None if there is none."""
    for config in manifest.preparations:
        if name in {source["name"] for source in config.get("sources", [])}:
            return config
    return None
