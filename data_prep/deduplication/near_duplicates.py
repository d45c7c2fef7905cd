"""Near-duplicate phase between map and reduce: its work units, and the ids that result.

A unit takes a part of the range of all band keys, finds the similar pairs among documents that share one, and writes
them to a file, which also marks the unit as done. The pairs of all units form clusters, and the earliest document of
each cluster stays.

Clusters are transitive: if A is similar to B and B to C, B and C are dropped, though A and C may be less similar. That
is the usual rule for training corpora (Lee et al. 2021, "Deduplicating Training Data Makes Language Models Better",
arXiv 2107.06499, which takes the connected components of the graph of similar pairs; datatrove does so for FineWeb).
It needs no more pairs than a star in each group, and it does not depend on the order in which they are found.

A million documents, 300,000 of them copies and 100,000 of these of one document, took 8 seconds on two cores with the
default settings, 278 MB in the largest process, and 724 MB of signature files (tests/benchmarks/near_duplicates.py
and its results/near_duplicates_scale.json). A unit's memory is bounded up to about 120 million documents, where 1024
parts of two million keys are full; beyond, the parts get larger. The process that makes the clusters holds those
documents that have a near copy.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from data_prep.config.preparation_config import DeduplicationSettings
from data_prep.dataset.manifest_records import ShardRecord
from data_prep.dataset.shards import read_records
from data_prep.deduplication.signature_files import MAX_PARTS, SignatureFiles, open_signatures
from data_prep.deduplication.similarity_search import clusters, similar_pairs
from data_prep.storage import storage
from data_prep.storage.sealing import sealed, unsealed

# Bounds of a unit's memory: band keys that it sorts, and pairs whose signatures it holds at once.
_PART_ENTRIES = 1 << 21
_PAIRS_AT_ONCE = 1 << 17
_COMPARED_AT_ONCE = 1 << 13


class Run(Protocol):
    """Run the tasks whose result does not exist yet, with progress in amounts of a unit, such as ("MB", 1e6)."""

    def __call__(
        self,
        title: str,
        task_function: Callable[[Any], object],
        tasks: Sequence[Any],
        result_url: Callable[[Any], str],
        amount: Callable[[Any], int],
        unit: tuple[str, float],
    ) -> None: ...


@dataclass(frozen=True)
class SignatureTask:
    """Finished shard whose documents are signed again from their tokens, for comparison with new ones."""

    folder: str
    shard: ShardRecord
    settings: DeduplicationSettings
    work_folder: str


@dataclass(frozen=True)
class PairTask:
    """Part of the range of band keys, with everything needed to search it on any host."""

    part: int
    num_parts: int
    signature_urls: tuple[str, ...]
    settings: DeduplicationSettings
    work_folder: str


def signatures_url(work_folder: str, number: int) -> str:
    """Return the URL of the signatures of a unit of the first phase."""
    return storage.join(work_folder, f"map-{number:06d}.signatures")


def shard_signatures_url(task: SignatureTask) -> str:
    """Return the URL of the signatures of a shard's documents."""
    return storage.join(task.work_folder, f"parent-{task.shard.name.removesuffix('.tar')}.signatures")


def pairs_url(task: PairTask) -> str:
    """Return the URL of the similar pairs of a part."""
    return storage.join(task.work_folder, f"near-{task.part:04d}-of-{task.num_parts:04d}.pairs")


def shard_signatures(task: SignatureTask) -> int:
    """Sign a shard's documents; the existing file marks the task as done. Return the number of documents."""
    url = storage.join(task.folder, task.shard.name)
    with tempfile.TemporaryDirectory(prefix="clozeworks-") as cache:
        path = storage.local_copy(url, cache, task.shard.sha256)
        with open_signatures(shard_signatures_url(task), task.settings) as writer:
            for _, record, _ in read_records(path):
                documents = np.split(record.tokens, record.documents[1:].astype(np.int64))
                for document_id, tokens in zip(record.document_ids.tolist(), documents, strict=True):
                    writer.add(document_id, tokens)
    return task.shard.documents


def find_pairs(task: PairTask) -> int:
    """Write the similar pairs of a part, (P, 2) int64 indices; the existing file marks it as done. Return 1."""
    files = SignatureFiles(task.signature_urls, task.settings)
    min_equal = math.ceil(task.settings.threshold * task.settings.num_hashes - 1e-9)

    def are_similar(pairs: np.ndarray) -> np.ndarray:
        similar = np.empty(len(pairs), bool)
        for start in range(0, len(pairs), _PAIRS_AT_ONCE):
            chunk = slice(start, start + _PAIRS_AT_ONCE)
            indices, numbers = np.unique(pairs[chunk], return_inverse=True)
            similar[chunk] = _equal_counts(files.signatures(indices), numbers.reshape(-1, 2)) >= min_equal
        return similar

    pairs = similar_pairs(*files.entries(task.part, task.num_parts), are_similar)
    storage.write_bytes(pairs_url(task), sealed(pairs.astype("<i8").tobytes()))
    return 1


def find_near_duplicates(
    signature_urls: Sequence[str],
    settings: DeduplicationSettings,
    work_folder: str,
    run: Run,
    num_parent_files: int = 0,
) -> np.ndarray:
    """Return the ids of documents with an earlier near-duplicate, and the ids that stay: (n, 2) uint64, sorted.

    Documents are ordered by their file in `signature_urls`, then by their index in it. Documents of equal id count as
    one, the earliest. The first `num_parent_files` belong to the data set that is extended: its documents come before
    all others and are never in the result.

    The result depends only on signatures and settings: not on the number of processes, nor on kills.

    Raises:
        UserError: a file of signatures or pairs is damaged.
    """
    files = SignatureFiles(signature_urls, settings)
    num_parts = _num_parts(files.num_entries)
    tasks = [PairTask(part, num_parts, tuple(signature_urls), settings, work_folder) for part in range(num_parts)]
    run("comparing", find_pairs, tasks, pairs_url, lambda task: 1, ("parts", 1.0))
    members, roots = np.empty(0, np.int64), np.empty(0, np.int64)
    for task in tasks:
        pairs = _read_pairs(pairs_url(task))
        members, roots = clusters(np.concatenate([np.column_stack([roots, members]), pairs]))
    return _later_ids(files.document_ids(members), members, roots, files.first_indices[num_parent_files])


def _read_pairs(url: str) -> np.ndarray:
    return np.frombuffer(unsealed(storage.read_bytes(url), url), "<i8").reshape(-1, 2)


def _later_ids(ids: np.ndarray, indices: np.ndarray, roots: np.ndarray, first_new_index: int) -> np.ndarray:
    """Return the ids of cluster members except the earliest of each cluster and those before the first new index.

    Returns (n, 2) uint64: each id with that of the earliest member of its cluster.
    """
    unique_ids, firsts, numbers = np.unique(ids, return_index=True, return_inverse=True)
    stays = np.zeros(len(unique_ids), bool)
    # A copy of the earliest member is similar to it, so it is in its cluster and has its id.
    stays[numbers[indices == roots]] = True
    stays |= indices[firsts] < first_new_index
    kept_as = ids[np.searchsorted(indices, roots[firsts])]
    return np.column_stack([unique_ids, kept_as])[~stays]


def _equal_counts(signatures: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Return the number of equal values of each pair (n, 2) of row numbers, (n,) int64."""
    counts = np.empty(len(pairs), np.int64)
    for start in range(0, len(pairs), _COMPARED_AT_ONCE):
        left, right = pairs[start : start + _COMPARED_AT_ONCE].T
        counts[start : start + len(left)] = np.count_nonzero(signatures[left] == signatures[right], axis=1)
    return counts


def _num_parts(num_entries: int) -> int:
    """Return the number of units: the least power of two that bounds the memory of each, at most 1024."""
    parts = 1
    while parts < MAX_PARTS and parts * _PART_ENTRIES < num_entries:
        parts *= 2
    return parts
