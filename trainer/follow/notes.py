"""`jobs.jsonl` of an output directory: which jobs on which checkpoints were begun, done, or failed.

Each line is `{"job": "score", "step": 10, "state": "pending", "at": seconds since 1970, ...}`; a later line of the same
job and step replaces an earlier one. Lines are appended, and a line that a kill tore is ignored. A line of the job
`branch` drops the notes of later steps, whose checkpoints another branch saves again. `registered.jsonl`, which earlier
releases wrote, is read as the beginning of the file.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from data_prep.base.errors import UserError
from data_prep.storage import storage

JOBS_NAME = "jobs.jsonl"
REGISTERED_NAME = "registered.jsonl"
BRANCH = "branch"

NoteState = Literal["pending", "done", "failed"]


@dataclass(frozen=True)
class Note:
    """What is known of a job on the checkpoint of a step."""

    job: str
    step: int
    state: NoteState
    result: Mapping[str, Any] = field(default_factory=dict)
    """What the job gave, or the reason of its failure; the other fields of the line."""
    at: float = 0.0
    """When it was noted, in seconds since 1970; 0 in notes of earlier releases."""


Notes = Mapping[tuple[str, int], Note]
"""The newest note of each job and step."""


def read_notes(output_dir: Path) -> dict[tuple[str, int], Note]:
    """Return the newest note of each job and step."""
    notes: dict[tuple[str, int], Note] = {}
    for note in (*_read_lines(output_dir / REGISTERED_NAME, _of_registration), *_read_lines(output_dir / JOBS_NAME)):
        if note.job == BRANCH:
            notes = {key: each for key, each in notes.items() if each.step <= note.step}
        else:
            notes[note.job, note.step] = note
    return notes


def add_note(output_dir: Path, job: str, step: int, state: NoteState, result: Mapping[str, Any] | None = None) -> Note:
    """Append a note, and return it.

    Raises:
        UserError: the file cannot be written.
    """
    note = Note(job, step, state, result or {}, round(time.time(), 3))
    line = json.dumps({**note.result, "job": job, "step": step, "state": state, "at": note.at}) + "\n"
    try:
        with open(output_dir / JOBS_NAME, "ab+") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else f"\n{line}"  # after a line that a kill tore
            file.write(line.encode())
    except OSError as error:
        raise UserError(
            f"{output_dir / JOBS_NAME} cannot be written ({error.strerror})",
            fix="free space or correct its permissions, then rerun the same command",
            code="unwritable-jobs",
        ) from None
    return note


def stamp(output_dir: Path) -> tuple[int, int] | None:
    """Return what changes when a note is added; None without notes."""
    try:
        status = (output_dir / JOBS_NAME).stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _of_registration(values: dict[str, Any]) -> dict[str, Any]:
    """Read a line of `registered.jsonl`, which has a version once the checkpoint was registered."""
    return {"job": "register", "state": "done" if "version" in values else "pending", **values}


def _read_lines(path: Path, adapt: Any = dict) -> Iterator[Note]:
    if not path.exists():
        return
    for line in storage.read_bytes(path).split(b"\n"):
        try:
            values = adapt(json.loads(line))
            job, step, state = str(values.pop("job")), int(values.pop("step")), values.pop("state")
            at = float(values.pop("at", 0.0))
        except (ValueError, KeyError, TypeError):
            continue  # torn by a kill
        if state in get_args(NoteState):
            yield Note(job, step, state, values, at)
