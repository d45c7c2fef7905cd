"""Files of the documents that filters and length limits dropped, with the reasons, for inspection.

This separate phase reads the inputs once more, so preparation without it costs nothing. Every unit writes one file of
JSON lines, whose name depends on the settings and the content of the inputs; `dropped.json` is written last and lists
the files. The bytes are the same for any number of workers and any history of kills.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import IO, Any

from data_prep.base.errors import UsageError, UserError
from data_prep.dataset.manifest_records import step_of
from data_prep.documents.document import Document
from data_prep.documents.input_units import InputUnit
from data_prep.documents.rejects import BadInput
from data_prep.executors.phases import PhaseRunner
from data_prep.pipeline.job import Job
from data_prep.pipeline.map_phase import MapSummary
from data_prep.pipeline.plan import Plan
from data_prep.pipeline.plan_changes import description
from data_prep.pipeline.units import Unit
from data_prep.storage import storage
from data_prep.text.text_batch import normalize_batch

INDEX_NAME = "dropped.json"
_STEPS = ("filtering", "cleaning")
_OWN_FILE = re.compile(r"dropped-.*\.jsonl\.gz|\.dropped\b.*" + re.escape(storage.PARTIAL_SUFFIX))


@dataclass(frozen=True)
class DroppedUnit:
    """A unit whose dropped documents are written to `url`.

    Attributes:
        sha256: of what preparation read from each part.
    """

    unit: Unit
    sha256: tuple[str, ...]
    url: str


def check_dropped_folder(plan: Plan, output: str, replaced: Iterable[Mapping[str, Any]] = ()) -> None:
    """Check that the folder `keep_dropped` of the configuration, if it is set, is free or of this preparation.

    Args:
        replaced: descriptions of the preparations that this one replaces, as `--fresh` does; theirs may be there.

    Raises:
        UsageError: it is the folder of the data set.
        UserError: it holds the dropped documents of another preparation.
    """
    if plan.config.keep_dropped is None:
        return
    folder = storage.absolute(plan.config.keep_dropped)
    if storage.canonical(folder).rstrip("/") == storage.canonical(output).rstrip("/"):
        raise UsageError(
            f"keep_dropped={storage.redact(folder)} is the folder of the data set",
            fix="name another folder",
            code="keep-dropped-in-output",
        )
    index = _read_index(folder)
    if index is not None and index.get("preparation") not in {_preparation(plan), *map(_digest, replaced)}:
        raise UserError(
            f"keep_dropped={storage.redact(folder)} holds the dropped documents of another preparation",
            fix="give another folder, or remove this one",
            code="keep-dropped-in-use",
        )


def remove_dropped(plan: Plan, replaced: Iterable[Mapping[str, Any]]) -> None:
    """Remove the dropped documents of preparations that are replaced, given by their descriptions; the index last."""
    if plan.config.keep_dropped is None:
        return
    folder = storage.absolute(plan.config.keep_dropped)
    index = _read_index(folder)
    if index is not None and index.get("preparation") in set(map(_digest, replaced)):
        for name in storage.list_names(folder):
            if name in index.get("files", ()) and _OWN_FILE.fullmatch(name):
                storage.remove(storage.join(folder, name))
        storage.remove(storage.join(folder, INDEX_NAME))


def keep_dropped(plan: Plan, job: Job, output: str, summary: MapSummary, runner: PhaseRunner) -> None:
    """Write the dropped documents into the folder `keep_dropped` of the configuration, if it is set.

    Raises:
        UsageError: it is the folder of the data set.
        UserError: an input changed since it was read, or the folder cannot be written or is of another preparation,
            which may have finished meanwhile.
    """
    if plan.config.keep_dropped is None:
        return
    check_dropped_folder(plan, output)
    folder = storage.absolute(plan.config.keep_dropped)
    preparation = _preparation(plan)
    name = hashlib.sha256("".join([preparation, *summary.digests]).encode()).hexdigest()[:16]
    digests = iter(summary.digests)
    tasks = [
        DroppedUnit(
            unit.absolute,
            tuple(islice(digests, len(unit.parts))),
            storage.join(folder, f"dropped-{name}-{unit.number:06d}.jsonl.gz"),
        )
        for unit in plan.units
    ]
    runner.run(
        "keeping dropped documents",
        job.task(write_dropped),
        tasks,
        lambda task: task.url,
        lambda task: task.unit.bytes,
        ("MB of input", 1e6),
    )
    index = {
        "preparation": preparation,
        "files": [task.url.rpartition("/")[2] for task in tasks],
        "dropped": {
            source.name: {reason: count for reason, count in sorted(dropped.items()) if step_of(reason) in _STEPS}
            for source, dropped in zip(plan.config.sources, summary.dropped, strict=True)
        },
    }
    storage.write_bytes(storage.join(folder, INDEX_NAME), (json.dumps(index, indent=1, sort_keys=True) + "\n").encode())
    for stale in set(storage.list_names(folder)) - {*index["files"], INDEX_NAME}:
        if _OWN_FILE.fullmatch(stale):  # named by no index, or partial and of a killed process
            storage.remove(storage.join(folder, stale))


def check_dropped_kept(plan: Plan) -> None:
    """Check that the dropped documents of a finished preparation were written, if the configuration requests them.

    Raises:
        UserError: they were not written.
    """
    if plan.config.keep_dropped is None:
        return
    index = _read_index(plan.config.keep_dropped)
    if index is None or index.get("preparation") != _preparation(plan):
        where = storage.redact(storage.join(plan.config.keep_dropped, INDEX_NAME))
        raise UserError(
            f"the data set is complete, and {where} is not the index of its dropped documents",
            fix="run the same command with --fresh",
            code="dropped-not-kept",
        )


def write_dropped(job: Job, task: DroppedUnit) -> None:
    """Write the file of a unit.

    Raises:
        UserError: an input changed since it was read.
    """
    with (
        storage.local_write(task.url) as path,
        open(path, "wb") as file,
        # No name or time in the header, so that the bytes depend on the documents alone.
        gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0, compresslevel=6) as written,
    ):
        for part, sha256 in zip(task.unit.parts, task.sha256, strict=True):
            with tempfile.TemporaryFile() as lines:
                if _write_part(job, part, sha256, lines):
                    lines.seek(0)
                    shutil.copyfileobj(lines, written)


def _write_part(job: Job, part: InputUnit, sha256: str, lines: IO[bytes]) -> bool:
    """Write the lines of a part; return whether they count: a damaged file is dropped as a whole."""

    def write(document: Document, reason: str) -> None:
        lines.write((json.dumps(_record(document, reason), sort_keys=True) + "\n").encode())

    reader, settings = job.reading.reader(part), job.reading.settings[part.source]
    reader.is_quiet = True  # preparation has reported what it dropped
    try:
        _write_short_and_long(job, job.reading.filters(part.source).apply(reader, write), part, write)
    except BadInput as error:
        if not error.spoils_file or settings.on_bad_input == "error":
            raise
        return False
    if reader.sha256 != sha256:
        raise UserError(
            f"input {storage.redact(part.url)} changed while it was read",
            fix="run the command again with --fresh once it is complete",
            code="input-changed",
        )
    return True


def _write_short_and_long(
    job: Job, documents: Iterator[Document], part: InputUnit, write: Callable[[Document, str], None]
) -> None:
    """Write the documents that cleaning drops, with the rule of preparation; those of a takedown are not among them."""
    settings, normalization = job.reading.settings[part.source], job.tokenizer().normalization
    excluded = job.excluded_names()
    for document in documents:
        if excluded is not None and excluded.excludes(document, part.name):
            continue
        batch = normalize_batch([document.text], normalization)
        num_characters = max(0, len(batch.document(0).decode()) - 1)  # without the space before the text
        if not num_characters:
            write(document, "empty")
        elif num_characters < settings.min_document_characters:
            write(document, "too short")
        elif num_characters > (settings.max_document_characters or num_characters):
            write(document, "too long")


def _record(document: Document, reason: str) -> dict[str, Any]:
    values = {"id": document.id, "url": document.url, "language": document.language, "metadata": document.metadata}
    return {"reason": reason, "source": document.source, "text": document.text} | {
        name: value for name, value in values.items() if value
    }


def _preparation(plan: Plan) -> str:
    return _digest(description(plan))


def _digest(preparation: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(preparation, sort_keys=True).encode()).hexdigest()


def _read_index(folder: str) -> dict[str, Any] | None:
    """Return the index in a folder; None if there is none, and an empty one if it cannot be read."""
    url = storage.join(folder, INDEX_NAME)
    if not storage.exists(url):
        return None
    try:
        index = json.loads(storage.read_bytes(url))
    except (ValueError, RecursionError):
        return {}
    return index if isinstance(index, dict) else {}
