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
and its results/near_duplicates.json). A unit's memory is bounded up to about 120 million documents, where 1024
parts of two million keys are full; beyond, the parts get larger. The process that makes the clusters holds those
documents that have a near copy.

File opens are bounded: more than `MAX_FILES` files of signatures are joined into at most `MAX_JOINED` first, and each
part opens each of these once.
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
from data_prep.deduplication.signature_files import MAX_PARTS, SignatureFiles, join_signatures, open_signatures
from data_prep.deduplication.similarity_search import clusters, similar_pairs
from data_prep.storage import storage
from data_prep.storage.work_files import sealed, unsealed

MAX_FILES = 128
"""Files of signatures that a part opens; more are joined first."""
MAX_JOINED = 32
PAIR_FILES_AT_ONCE = 128
"""Files of pairs that one process reads; the clusters of more are formed in several steps."""

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
class JoinTask:
    """Consecutive files of signatures to join into one."""

    signature_urls: tuple[str, ...]
    settings: DeduplicationSettings
    url: str


@dataclass(frozen=True)
class ClusterTask:
    """Files of pairs whose clusters go to one file."""

    pair_urls: tuple[str, ...]
    url: str


@dataclass(frozen=True)
class PairTask:
    """Part of the range of band keys, with everything needed to search it on any host."""

    part: int
    num_parts: int
    signature_urls: tuple[str, ...]
    settings: DeduplicationSettings
    work_folder: str


def signatures_url(work_folder: str, unit_name: str) -> str:
    """Return the URL of the signatures of a unit of the first phase."""
    return storage.join(work_folder, f"map-{unit_name}.signatures")


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


def join_files(task: JoinTask) -> int:
    """Write the joined file; its existence marks the task as done. Return the number of files joined."""
    join_signatures(task.signature_urls, task.url, task.settings)
    return len(task.signature_urls)


def find_pairs(task: PairTask) -> int:
    """Write the similar pairs of a part, (P, 2) int64 indices; the existing file marks it as done. Return 1."""
    with SignatureFiles(task.signature_urls, task.settings) as files:
        pairs = _pairs_in(files, task)
    storage.write_bytes(pairs_url(task), sealed(pairs.astype("<i8").tobytes()))
    return 1


def _pairs_in(files: SignatureFiles, task: PairTask) -> np.ndarray:
    min_equal = math.ceil(task.settings.threshold * task.settings.num_hashes - 1e-9)

    def are_similar(pairs: np.ndarray) -> np.ndarray:
        similar = np.empty(len(pairs), bool)
        for start in range(0, len(pairs), _PAIRS_AT_ONCE):
            chunk = slice(start, start + _PAIRS_AT_ONCE)
            indices, numbers = np.unique(pairs[chunk], return_inverse=True)
            similar[chunk] = _equal_counts(files.signatures(indices), numbers.reshape(-1, 2)) >= min_equal
        return similar

    return similar_pairs(*files.entries(task.part, task.num_parts), are_similar)


def form_clusters(task: ClusterTask) -> int:
    """Write each member of a cluster with its root, as a file of pairs, which marks the task as done."""
    members, roots = _clusters_of(task.pair_urls)
    storage.write_bytes(task.url, sealed(np.column_stack([roots, members]).astype("<i8").tobytes()))
    return len(task.pair_urls)


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
    """
    urls, num_parent_files = _few_files(signature_urls, num_parent_files, settings, work_folder, run)
    with SignatureFiles(urls, settings) as files:
        num_parts = _num_parts(files.num_entries)
        tasks = [PairTask(part, num_parts, tuple(urls), settings, work_folder) for part in range(num_parts)]
        run("comparing", find_pairs, tasks, pairs_url, lambda task: 1, ("parts", 1.0))
        pair_urls = [pairs_url(task) for task in tasks]
        if len(pair_urls) > PAIR_FILES_AT_ONCE:
            pair_urls = _few_pair_files(pair_urls, work_folder, run)
        members, roots = _clusters_of(pair_urls)
        return _later_ids(files.document_ids(members), members, roots, files.first_indices[num_parent_files])


def _groups_to_join(num_files: int, num_parent_files: int) -> list[range]:
    """Return the numbers of the files that are joined, of the extended data set apart; at most `MAX_JOINED` groups."""
    size = -(-num_files // (MAX_JOINED - 1))
    firsts = [*range(0, num_parent_files, size), *range(num_parent_files, num_files, size)]
    stops = [min(first + size, num_parent_files if first < num_parent_files else num_files) for first in firsts]
    return [range(first, stop) for first, stop in zip(firsts, stops, strict=True)]


def _few_files(
    urls: Sequence[str], num_parent_files: int, settings: DeduplicationSettings, work_folder: str, run: Run
) -> tuple[Sequence[str], int]:
    """Join the files where they are many; return those to read, and how many of them hold the extended data set."""
    if len(urls) <= MAX_FILES:
        return urls, num_parent_files
    groups = _groups_to_join(len(urls), num_parent_files)
    tasks = [
        JoinTask(
            tuple(urls[number] for number in group),
            settings,
            storage.join(work_folder, f"joined-{group.start:06d}.signatures"),
        )
        for group in groups
    ]
    run("joining", join_files, tasks, lambda task: task.url, lambda task: len(task.signature_urls), ("files", 1.0))
    return [task.url for task in tasks], sum(group.start < num_parent_files for group in groups)


def _few_pair_files(urls: Sequence[str], work_folder: str, run: Run) -> list[str]:
    firsts = range(0, len(urls), PAIR_FILES_AT_ONCE)
    tasks = [
        ClusterTask(
            tuple(urls[first : first + PAIR_FILES_AT_ONCE]),
            storage.join(work_folder, f"clusters-{first:04d}-of-{len(urls):04d}.pairs"),
        )
        for first in firsts
    ]
    run("clustering", form_clusters, tasks, lambda task: task.url, lambda task: len(task.pair_urls), ("files", 1.0))
    return [task.url for task in tasks]


def _clusters_of(pair_urls: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the members of the clusters of all pairs and their roots, as `clusters`."""
    members, roots = np.empty(0, np.int64), np.empty(0, np.int64)
    for url in pair_urls:
        members, roots = clusters(np.concatenate([np.column_stack([roots, members]), _read_pairs(url)]))
    return members, roots


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
