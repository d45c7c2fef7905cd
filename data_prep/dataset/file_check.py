"""Comparing the files of a data set with what the manifest says of them, without reading what they mean."""

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
    """A file to compare, in a data set's folder."""

    folder: str
    file: FileRecord


def file_tasks(folder: str, manifest: Manifest) -> list[FileTask]:
    """All shards, their indexes and the token counts."""
    files = [file for shard in manifest.shards for file in (shard, shard.index)]
    return [FileTask(folder, file) for file in (*files, manifest.token_counts)]


def size_problems(tasks: Sequence[FileTask]) -> list[str]:
    """Files that are missing or of another size, a line each; nothing is read."""
    with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as threads:
        return [problem for problem in threads.map(size_problem, tasks) if problem is not None]


def size_problem(task: FileTask) -> str | None:
    """What is wrong with the file's size, if anything."""
    url = storage.join(task.folder, task.file.name)
    if not storage.exists(url):
        return f"{task.file.name} is missing"
    found = storage.size(url)
    return None if found == task.file.bytes else f"{task.file.name} has {found} bytes and not {task.file.bytes}"


def content_problem(task: FileTask) -> str | None:
    """What is wrong with the file's size or, read whole, with its sha256, if anything."""
    problem = size_problem(task)
    if problem is None and storage.sha256_of(storage.join(task.folder, task.file.name)) != task.file.sha256:
        problem = f"{task.file.name} has other content"
    return problem
