"""Folders of documents beside a data set, as files of JSON lines: the dropped ones, and the texts of the others.

The map phase writes the rows (`RowWriter`), so every input is read once. When the shards are done, every unit gets one
file in each folder, whose name depends on the settings and the content of the inputs. The index of a folder is written
last and lists the files. The bytes are the same for any number of workers and any history of kills.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_prep.base.errors import UsageError, UserError
from data_prep.documents.drops import (
    CLEANING,
    EARLIER_FILTERING,
    ENCODING,
    FILTERED_TEXT,
    Drop,
    by_step,
    by_summary,
    place_of_filter,
)
from data_prep.executors.phases import PhaseRunner, Tally, add_up_results, unfinished
from data_prep.pipeline.encoding import kept_ids, read_rows
from data_prep.pipeline.job import Job
from data_prep.pipeline.map_phase import MapSummary
from data_prep.pipeline.map_task import sections_url
from data_prep.pipeline.plan import Plan, description
from data_prep.pipeline.reduce_task import SeenIds
from data_prep.pipeline.sections import read_summary
from data_prep.storage import storage
from data_prep.storage.work_files import read_state, write_state

_STEPS = (EARLIER_FILTERING, FILTERED_TEXT, CLEANING, ENCODING)  # besides the filters
_NO_NAME = re.compile("[^A-Za-z0-9_]+")
_MOST_NAME_CHARACTERS = 40


@dataclass(frozen=True)
class DocumentFolder:
    """A kind of folder.

    Attributes:
        kind: in `Plan.keeps`; the names of its files begin with it.
        setting: that names the folder.
        index_name: of the index; that of the texts has no ending of a format, so that readers of whole folders skip it.
        content: what the folder holds, for messages.
        code: of errors: what it is.
    """

    kind: str
    setting: str
    index_name: str
    content: str
    code: str

    def is_own_file(self, name: str) -> bool:
        """Whether a preparation may have written a file of this name."""
        partial = re.escape(storage.PARTIAL_SUFFIX)
        return re.fullmatch(rf"{self.kind}-.*\.jsonl\.gz|\.{self.kind}\b.*{partial}", name) is not None

    def url(self, plan: Plan) -> str:
        return storage.absolute(getattr(plan.config, self.setting))


FOLDERS = (
    DocumentFolder("dropped", "keep_dropped", "dropped.json", "dropped documents", "keep-dropped"),
    DocumentFolder("text", "text_output", "text.index", "texts", "text-output"),
)


@dataclass(frozen=True)
class UnitFile:
    """The file of a unit in a folder, and the file that marks it as written."""

    kind: str
    number: int
    source: str
    url: str
    done_url: str


def check_folders(plan: Plan, output: str, replaced: Iterable[Mapping[str, Any]] = ()) -> None:
    """Check that the folders of the configuration are free or of this preparation, and apart from all else.

    Args:
        replaced: descriptions of the preparations that this one replaces, as `--fresh` does; theirs may be there.
    """
    replaced, taken = [*replaced], {_folder(output): "the folder of the data set"}
    for each in _folders(plan):
        folder = each.url(plan)
        where = f"{each.setting}={storage.redact(folder)}"
        if _folder(folder) in taken:
            raise UsageError(
                f"{where} is {taken[_folder(folder)]}", fix="name another folder", code=f"{each.code}-in-output"
            )
        taken[_folder(folder)] = f"the folder of {each.setting} too"
        for file in plan.inputs:
            if storage.canonical(file.url).startswith(f"{_folder(folder)}/"):
                raise UsageError(
                    f"input {storage.redact(file.url)} lies in the folder {where}",
                    fix="choose a folder apart from the inputs",
                    code="input-in-output",
                )
        index = _read_index(folder, each)
        if index is not None and not _is_of(index, plan) and index.get("preparation") not in {*map(_digest, replaced)}:
            raise UserError(
                f"{where} holds the {each.content} of another preparation",
                fix="give another folder, or remove this one",
                code=f"{each.code}-in-use",
            )


def remove_folders(plan: Plan, replaced: Iterable[Mapping[str, Any]]) -> None:
    """Remove the documents of preparations that are replaced, given by their descriptions; the index last."""
    digests = set(map(_digest, replaced))
    for each in _folders(plan):
        folder = each.url(plan)
        index = _read_index(folder, each)
        if index is not None and index.get("preparation") in digests:
            for name in set(storage.list_names(folder)).intersection(_names(index)):
                if each.is_own_file(name):
                    storage.remove(storage.join(folder, name))
            storage.remove(storage.join(folder, each.index_name))


def write_folders(plan: Plan, job: Job, output: str, summary: MapSummary, runner: PhaseRunner) -> None:
    """Write the documents into the folders of the configuration."""
    check_folders(plan, output)
    name = hashlib.sha256("".join([_preparation(plan), *summary.digests]).encode()).hexdigest()[:16]
    for each in _folders(plan):
        folder, sources = each.url(plan), _names_of_sources(plan)
        tasks = []
        for unit in plan.units:
            file_name = f"{each.kind}-{name}-{unit.number:06d}.jsonl.gz"
            if each.kind == "text":
                file_name = f"{each.kind}-{sources[unit.source]}-{unit.number:06d}-{name}.jsonl.gz"
            url = storage.join(folder, file_name)
            done = f"{each.kind}-{unit.number:06d}-{hashlib.sha256(url.encode()).hexdigest()[:16]}.done.json"
            source = plan.config.sources[unit.source].name
            tasks.append(UnitFile(each.kind, unit.number, source, url, storage.join(job.work_folder, done)))
        _write_files(plan, job, each, tasks, runner)
        index: dict[str, Any] = {"preparation": _preparation(plan), "parent": _parent(plan)}
        index["files"] = [_name(task.url) for task in tasks]
        if each.kind == "dropped":
            counts = zip(plan.config.sources, summary.dropped, strict=True)
            kept = {source.name: _kept_drops(dropped) for source, dropped in counts}
            index["dropped"] = {name: by_summary(drops) for name, drops in kept.items()}
            index["dropped_by_step"] = {name: by_step(drops) for name, drops in kept.items()}
        else:
            urls = [task.done_url for task in tasks]
            index["files"] = add_up_results(urls, _of_file, job.work_folder, f"text-{name}", runner).lists["files"]
        data = json.dumps(index, indent=1, sort_keys=True) + "\n"
        storage.write_bytes(storage.join(folder, each.index_name), data.encode())
        for stale in set(storage.list_names(folder)).difference(_names(index)):
            if each.is_own_file(stale):  # named by no index, or partial and of a killed process
                storage.remove(storage.join(folder, stale))


def check_folders_written(plan: Plan) -> None:
    """Check that the documents of a finished preparation were written, if the configuration requests them."""
    for each in _folders(plan):
        index = _read_index(each.url(plan), each)
        if index is None or index.get("preparation") != _preparation(plan):
            where = storage.redact(storage.join(each.url(plan), each.index_name))
            raise UserError(
                f"the data set is complete, and {where} is not the index of its {each.content}",
                fix="run the same command with --fresh"
                if plan.parent is None
                else f"leave {each.setting} out: a finished addition is not read again",
                code="dropped-not-kept" if each.kind == "dropped" else "text-not-written",
            )


def _write_files(plan: Plan, job: Job, folder: DocumentFolder, tasks: list[UnitFile], runner: PhaseRunner) -> None:
    """Write the files that are not written, or were removed from the folder since."""
    names = set(storage.list_names(folder.url(plan)))
    waiting = {task.number for task in unfinished(tasks, lambda task: task.done_url)}
    for task in tasks:
        if task.number not in waiting and _name(task.url) not in names:
            storage.remove(task.done_url)
    runner.run(
        f"writing {folder.content}",
        job.task(write_file),
        tasks,
        lambda task: task.done_url,
        lambda task: plan.units[task.number].bytes,
        ("MB of input", 1e6),
    )


def write_file(job: Job, task: UnitFile) -> None:
    """Write the file of a unit, then the file that marks it as written."""
    lines = _texts(job, task.number) if task.kind == "text" else _dropped(job, task.number)
    num_documents = 0
    with storage.local_write(task.url) as path:
        # No name or time in the header, so that the bytes depend on the documents alone.
        with open(path, "wb") as file, gzip.GzipFile("", "wb", 6, file, mtime=0) as written:
            for line in lines:
                written.write(line)
                num_documents += 1
        record = {"name": _name(task.url), "source": task.source, "documents": num_documents}
        record |= {"bytes": storage.size(path), "sha256": storage.sha256_of(path)}
    write_state(task.done_url, record)


def _dropped(job: Job, number: int) -> Iterator[bytes]:
    for _, lines in read_rows(job, number, "dropped"):
        yield from lines


def _texts(job: Job, number: int) -> Iterator[bytes]:
    """Yield the lines of the documents of a unit that deduplication keeps: of equal ones the first."""
    kept = kept_ids(job, number, read_summary(sections_url(job.work_folder, job.units[number]))[1])
    seen, num_left = SeenIds(), len(kept)
    for ids, lines in read_rows(job, number, "text"):
        is_kept = np.isin(ids, kept)
        if job.deduplication.exact:
            is_kept &= seen.add(ids)
        num_left -= int(is_kept.sum())
        yield from (line for line, stays in zip(lines, is_kept.tolist(), strict=True) if stays)
    assert not num_left, "the rows of a unit are its documents"


def _kept_drops(dropped: Mapping[Drop, int]) -> dict[Drop, int]:
    """Return the drops whose documents are in the folder."""
    return {
        drop: count for drop, count in dropped.items() if drop.step in _STEPS or place_of_filter(drop.step) is not None
    }


def _of_file(url: str) -> Tally:
    return Tally(lists={"files": [read_state(url)]})


def _folders(plan: Plan) -> Iterator[DocumentFolder]:
    return (each for each in FOLDERS if each.kind in plan.keeps)


def _folder(url: str) -> str:
    return storage.canonical(storage.absolute(url)).rstrip("/")


def _name(url: str) -> str:
    return url.rpartition("/")[2]


def _names(index: Mapping[str, Any]) -> set[str]:
    """Return the names of the files that an index lists, which may have been edited."""
    files = index.get("files")
    found = [
        each.get("name") if isinstance(each, dict) else each for each in (files if isinstance(files, list) else ())
    ]
    return {name for name in found if isinstance(name, str)}


def _names_of_sources(plan: Plan) -> list[str]:
    """Return the sources' names as they stand in names of files, all with numbers if some would be equal."""
    names = [_NO_NAME.sub("_", source.name)[:_MOST_NAME_CHARACTERS] for source in plan.config.sources]
    return names if len({*names}) == len(names) else [f"{name}_{number}" for number, name in enumerate(names)]


def _preparation(plan: Plan) -> str:
    return _digest(description(plan))


def _parent(plan: Plan) -> str | None:
    return None if plan.parent is None else plan.parent.digest


def _is_of(index: Mapping[str, Any], plan: Plan) -> bool:
    """Whether an index is of this preparation; an addition leaves out what its data set has. Earlier ones name none."""
    return index.get("preparation") == _preparation(plan) and index.get("parent", _parent(plan)) == _parent(plan)


def _digest(preparation: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(preparation, sort_keys=True).encode()).hexdigest()


def _read_index(folder: str, kind: DocumentFolder) -> dict[str, Any] | None:
    """Return the index in a folder; None if there is none, and an empty one if it cannot be read."""
    url = storage.join(folder, kind.index_name)
    if not storage.exists(url):
        return None
    try:
        index = json.loads(storage.read_bytes(url))
    except (ValueError, RecursionError):
        return {}
    return index if isinstance(index, dict) else {}
