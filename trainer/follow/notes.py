"""`jobs.jsonl` of an output directory: the jobs on checkpoints that were begun, done or failed, and their results.

Each line is `{"job": "score", "step": 10, "state": "pending", "at": seconds since 1970, ...}`; a later line of the same
job and step replaces an earlier one. Lines are appended. Readers ignore a line that a kill tore, one of an unknown job,
and one that lacks a field of its kind (`RESULTS`). A line of the job `branch` drops the notes of later steps,
whose checkpoints another branch saves again. `registered.jsonl`, which earlier releases wrote, is read as the beginning
of the file.

Scores go from the notes to the MLflow run, the history and the status of a run. The history lists the scores that were
attached, so that none is attached twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from data_prep.base.errors import UserError
from data_prep.storage import storage
from trainer.config.run_config import RunConfig
from trainer.tracking.journal import read_record
from trainer.tracking.status import Scored, Started, add_metrics, append_history, read_history
from trainer.tracking.tracker import MetricLog, NullTracker, Tracker

JOBS_NAME = "jobs.jsonl"
REGISTERED_NAME = "registered.jsonl"
SCORE, REGISTER, BRANCH = "score", "register", "branch"
"""Names of jobs, and of the line that drops notes."""

NoteState = Literal["pending", "done", "failed"]


class _Fields(BaseModel):
    """Fields of a line, of these types and no others."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Line(_Fields):
    job: Literal["score", "register", "branch"]
    step: NonNegativeInt
    state: NoteState
    at: float = 0.0


class _Scores(_Fields):
    suite: str
    metrics: dict[str, float]
    facts: dict[str, str] = {}


class _FailedSuite(_Fields):
    suite: str
    reason: str


class _Version(_Fields):
    name: str
    version: str
    promotion: str = ""


class _FailedRegistration(_Fields):
    name: str
    reason: str
    command: str


RESULTS: Mapping[tuple[str, NoteState], type[_Fields]] = {
    (SCORE, "done"): _Scores,
    (SCORE, "failed"): _FailedSuite,
    (REGISTER, "done"): _Version,
    (REGISTER, "failed"): _FailedRegistration,
}
"""The fields of a result by job and state; notes of other states may have any fields."""


@dataclass(frozen=True)
class Note:
    """The state of a job on the checkpoint of a step."""

    job: str
    step: int
    state: NoteState
    result: Mapping[str, Any] = field(default_factory=dict)
    """The result of the job, or the reason for its failure; the other fields of the line."""
    at: float = 0.0
    """Time of the note, in seconds since 1970; 0 in notes of earlier releases."""
    position: int = -1
    """Byte of `jobs.jsonl` at which the line begins: it orders notes, whatever the clock does; -1 in notes of earlier
    releases."""


Notes = Mapping[tuple[str, int], Note]
"""The newest note of each job and step."""


def read_notes(output_dir: Path) -> dict[tuple[str, int], Note]:
    """Return the newest note of each job and step."""
    notes: dict[tuple[str, int], Note] = {}
    for note in (*_read_registrations(output_dir / REGISTERED_NAME), *_read_lines(output_dir / JOBS_NAME)):
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
    at = round(time.time(), 3)
    line = json.dumps({**(result or {}), "job": job, "step": step, "state": state, "at": at}) + "\n"
    try:
        with open(output_dir / JOBS_NAME, "ab+") as file:
            if position := file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # after a line that a kill tore
                    position, line = position + 1, f"\n{line}"
            file.write(line.encode())
    except OSError as error:
        raise UserError(
            f"{output_dir / JOBS_NAME} cannot be written ({error.strerror})",
            fix="free space or correct its permissions, then rerun the same command",
            code="unwritable-jobs",
        ) from None
    return Note(job, step, state, result or {}, at, position)


def end_of_notes(output_dir: Path) -> int:
    """Return the byte at which the next note will begin: the notes of this start are those from there on."""
    return (stamp(output_dir) or (0, 0))[0]


def check_result(job: str, state: NoteState, result: Mapping[str, Any]) -> None:
    """Check that a note with this result can be read again.

    Raises:
        ValueError: a field is missing, or of another type.
    """
    if (job, state) in RESULTS:
        RESULTS[job, state].model_validate(result)


def stamp(output_dir: Path) -> tuple[int, int] | None:
    """Return size and time of the last change of the notes, which a new note changes; None without notes."""
    try:
        status = (output_dir / JOBS_NAME).stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def unattached(output_dir: Path, notes: Notes) -> list[Note]:
    """Return the notes whose scores are not in the history, in the order of their steps.

    A start from an earlier step branches or repeats the later steps, whose scores are attached again: an MLflow run
    keeps the first value of a step.
    """
    attached: dict[int, set[str]] = {}
    for event in read_history(output_dir):
        if isinstance(event, Started):
            attached = {step: names for step, names in attached.items() if step <= event.step}
        elif isinstance(event, Scored):
            attached.setdefault(event.step, set()).update(event.metrics)
    scored = [note for note in notes.values() if note.job == SCORE and note.state == "done"]
    missing = [note for note in scored if not note.result["metrics"].keys() <= attached.get(note.step, set())]
    return sorted(missing, key=lambda note: note.step)


def attach(note: Note, output_dir: Path, log_to: MetricLog, warn: Callable[[str], None]) -> dict[str, float]:
    """Log the scores of a note at the step of its checkpoint, and return them."""
    metrics: dict[str, float] = dict(note.result["metrics"])
    log_to.log(note.step, metrics)
    try:
        append_history(output_dir, "scored", {"step": note.step, "metrics": metrics})
    except OSError as error:
        warn(f"{output_dir} cannot be written ({error.strerror}); scores of step {note.step:,} may be attached twice")
    return metrics


@contextlib.contextmanager
def reopened_run(config: RunConfig, warn: Callable[[str], None]) -> Iterator[MetricLog]:
    """Open the MLflow run of a run that has ended, and close it with the same status.

    The caller has locked the output directory: one process at a time writes these metrics.
    """
    output_dir = Path(config.output_dir)
    record = read_record(output_dir / "tracking")
    if record is None:
        warn(f"{output_dir}/tracking has no MLflow run; the scores are in its checkpoints and history")
        yield NullTracker()
        return
    tracker = Tracker.open(config.tracking, output_dir, warn, choice="")
    try:
        yield tracker
    finally:
        tracker.close(
            "FINISHED" if record.status == "FINISHED" else "FAILED" if record.status == "FAILED" else "KILLED"
        )


def add_to_status(output_dir: Path, metrics: dict[str, float], warn: Callable[[str], None]) -> None:
    """Add the newest scores to the status of a run that has ended."""
    try:
        add_metrics(output_dir, metrics)
    except OSError as error:
        warn(f"{output_dir} cannot be written ({error.strerror}); its status lacks the newest scores")


def _read_registrations(path: Path) -> Iterator[Note]:
    """Read `registered.jsonl`: a line has a version once the checkpoint was registered."""
    for _, values in _read_objects(path):
        state = "done" if "version" in values else "pending"
        if (note := _note_of({"name": "the model", **values, "job": REGISTER, "state": state})) is not None:
            yield note


def _read_lines(path: Path) -> Iterator[Note]:
    for position, values in _read_objects(path):
        if (note := _note_of(values, position)) is not None:
            yield note


def _read_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Return the object of each whole line, with the byte at which the line begins."""
    position = 0
    for line in storage.read_bytes(path).split(b"\n") if path.exists() else ():
        with contextlib.suppress(ValueError):  # torn by a kill
            if isinstance(values := json.loads(line), dict):
                yield position, values
        position += len(line) + 1


def _note_of(values: dict[str, Any], position: int = -1) -> Note | None:
    """Return the note of a line; None if it is of an unknown job, or lacks a field, such as one of a later release."""
    try:
        line = _Line.model_validate(values)
        result = {name: value for name, value in values.items() if name not in _Line.model_fields}
        check_result(line.job, line.state, result)
    except ValidationError:
        return None
    return Note(line.job, line.step, line.state, result, line.at, position)
