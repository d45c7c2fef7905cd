"""The phase between map and reduce that finds near-duplicates: its work units, and the ids that they lead to.

A unit takes a part of the range of all band keys, finds the similar pairs among documents that share one, and
writes them to a file, which is its own mark that the unit is done. The pairs of all units make clusters, and of a
cluster the earliest document stays.

Clusters are transitive: where A is similar to B and B to C, B and C go for A, though A and C may be less alike. That
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

# What bounds a unit's memory: band keys that it sorts, and pairs whose signatures it holds at once.
_PART_ENTRIES = 1 << 21
_PAIRS_AT_ONCE = 1 << 17
_COMPARED_AT_ONCE = 1 << 13


class Run(Protocol):
    """Does the tasks whose result is not there yet, with progress in amounts of a unit, such as ("MB", 1e6)."""

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
    """A finished shard whose documents are signed again from their tokens, to be compared with new ones."""

    folder: str
    shard: ShardRecord
    settings: DeduplicationSettings
    work_folder: str


@dataclass(frozen=True)
class PairTask:
    """A part of the range of band keys, with all that is needed to search it anywhere."""

    part: int
    num_parts: int
    signature_urls: tuple[str, ...]
    settings: DeduplicationSettings
    work_folder: str


def signatures_url(work_folder: str, number: int) -> str:
    """Where the signatures of a unit of the first phase lie."""
    return storage.join(work_folder, f"map-{number:06d}.signatures")


def shard_signatures_url(task: SignatureTask) -> str:
    """Where the signatures of a shard's documents lie."""
    return storage.join(task.work_folder, f"parent-{task.shard.name.removesuffix('.tar')}.signatures")


def pairs_url(task: PairTask) -> str:
    """Where the similar pairs of a part lie."""
    return storage.join(task.work_folder, f"near-{task.part:04d}-of-{task.num_parts:04d}.pairs")


def shard_signatures(task: SignatureTask) -> int:
    """Sign a shard's documents; the file's existence says that it is done. Returns the number of its documents."""
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
    """Write the similar pairs of a part, (P, 2) int64 places; its existence says that it is done. Returns 1."""
    files = SignatureFiles(task.signature_urls, task.settings)
    min_equal = math.ceil(task.settings.threshold * task.settings.num_hashes - 1e-9)

    def are_similar(pairs: np.ndarray) -> np.ndarray:
        similar = np.empty(len(pairs), bool)
        for start in range(0, len(pairs), _PAIRS_AT_ONCE):
            chunk = slice(start, start + _PAIRS_AT_ONCE)
            places, numbers = np.unique(pairs[chunk], return_inverse=True)
            similar[chunk] = _equal_counts(files.signatures(places), numbers.reshape(-1, 2)) >= min_equal
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
    """The ids of the documents that have a near-duplicate before them, and of those that stay: (n, 2) uint64, sorted.

    A document's position is that of its file in `signature_urls`, then its place in it. Documents of equal id are
    one, at the earliest. The first `num_parent_files` are those of a data set that is added to: its documents
    come before all others, and are never in the answer.

    The answer depends on the signatures and settings alone: not on how many processes worked on it, nor on which of
    them were killed.

    Raises:
        UserError: a file of signatures or of pairs is not as it was written.
    """
    files = SignatureFiles(signature_urls, settings)
    num_parts = _num_parts(files.num_entries)
    tasks = [PairTask(part, num_parts, tuple(signature_urls), settings, work_folder) for part in range(num_parts)]
    run("comparing", find_pairs, tasks, pairs_url, lambda task: 1, ("parts", 1.0))
    members, roots = np.empty(0, np.int64), np.empty(0, np.int64)
    for task in tasks:
        pairs = _read_pairs(pairs_url(task))
        members, roots = clusters(np.concatenate([np.column_stack([roots, members]), pairs]))
    return _later_ids(files.document_ids(members), members, roots, files.first_places[num_parent_files])


def _read_pairs(url: str) -> np.ndarray:
    return np.frombuffer(unsealed(storage.read_bytes(url), url), "<i8").reshape(-1, 2)


def _later_ids(ids: np.ndarray, places: np.ndarray, roots: np.ndarray, first_new_place: int) -> np.ndarray:
    """The ids of clusters' members but each cluster's earliest, and but those that stand before the first new place.

    Returns (n, 2) uint64: beside each id that of the earliest of its cluster.
    """
    unique_ids, firsts, numbers = np.unique(ids, return_index=True, return_inverse=True)
    stays = np.zeros(len(unique_ids), bool)
    # A copy of the earliest is similar to it, so it is in its cluster and has its id.
    stays[numbers[places == roots]] = True
    stays |= places[firsts] < first_new_place
    kept_as = ids[np.searchsorted(places, roots[firsts])]
    return np.column_stack([unique_ids, kept_as])[~stays]


def _equal_counts(signatures: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """In how many places each pair (n, 2) of row numbers agrees, (n,) int64."""
    counts = np.empty(len(pairs), np.int64)
    for start in range(0, len(pairs), _COMPARED_AT_ONCE):
        left, right = pairs[start : start + _COMPARED_AT_ONCE].T
        counts[start : start + len(left)] = np.count_nonzero(signatures[left] == signatures[right], axis=1)
    return counts


def _num_parts(num_entries: int) -> int:
    """How many units share the work: the least power of two that keeps each to its memory, 1024 at most."""
    parts = 1
    while parts < MAX_PARTS and parts * _PART_ENTRIES < num_entries:
        parts *= 2
    return parts
