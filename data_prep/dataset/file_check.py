"""Checks of a data set's files against the sizes and sha256 in the manifest, without parsing them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from data_prep.dataset.manifest import Manifest
from data_prep.dataset.manifest_records import FileRecord
from data_prep.storage import storage

_REQUESTS_AT_ONCE = 16


@dataclass(frozen=True)
class FileTask:
    """A file to check, in the folder of a data set."""

    folder: str
    file: FileRecord


def file_tasks(folder: str, manifest: Manifest) -> list[FileTask]:
    """Return all shards, their indexes, the token counts and the provenance sidecars."""
    files = [file for shard in manifest.shards for file in (shard, shard.index)]
    return [FileTask(folder, file) for file in (*files, manifest.token_counts, *manifest.provenance_files)]


def size_problems(tasks: Sequence[FileTask]) -> list[str]:
    """Return one line for every file that is missing or has another size; no content is read."""
    with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as threads:
        return [problem for problem in threads.map(size_problem, tasks) if problem is not None]


def size_problem(task: FileTask) -> str | None:
    """Describe what is wrong with the file's size; None if nothing is."""
    url = storage.join(task.folder, task.file.name)
    if not storage.exists(url):
        return f"{task.file.name} is missing"
    found = storage.size(url)
    return None if found == task.file.bytes else f"{task.file.name} has {found} bytes instead of {task.file.bytes}"


def content_problem(task: FileTask) -> str | None:
    """Describe what is wrong with the file's size or sha256; None if nothing is."""
    problem = size_problem(task)
    if problem is None and storage.sha256_of(storage.join(task.folder, task.file.name)) != task.file.sha256:
        problem = f"{task.file.name} has another sha256 than the manifest names"
    return problem
