"""The journal of a tracked run: all that is to stand on a server is on disk here before a server learns of it.

points.jsonl   the journal: {"t": milliseconds, "s": step, "m": {key: value}}, a line per step, only ever appended to;
               the number of a line in its sequence is the byte at which it ends
run.json       identity (a tag of the run on the server), parameters, tags, status: replaced as a whole, and numbered
               by `revision`, which every change raises
artifacts/     files, as they are to stand in the run
cursors/       a file for each server: up to where it has these (trainer/tracking/delivery.py)

Whoever has the folder can send it: nothing that waits for a server lives in memory only.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import uuid
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from pydantic import BaseModel, Field, NonNegativeInt, ValidationError, field_validator

from data_prep.base.errors import UserError
from data_prep.storage import storage

ENTROPY_PARAM = "data.unigram_entropy_nats"
"""Parameter with the unigram entropy of the valid split, which figures and readers compare losses with."""
GIT_TAG = "clozeworks.git_revision"
LINEAGE_TAG = "clozeworks.data_lineage"
"""Tag of the run with the manifest digests of all data that its weights saw, separated by commas."""

POINTS_NAME = "points.jsonl"
RECORD_NAME = "run.json"
CURSORS_NAME = "cursors"
MAX_UNWRITTEN_BYTES = 16 << 20
_LARGEST = (1 << 63) - 1  # step or time that a server accepts


class Point(NamedTuple):
    """One value of a curve; `timestamp` in milliseconds is part of its identity on a server."""

    key: str
    value: float
    timestamp: int
    step: int


class DataSetInput(BaseModel):
    """A data set that the run reads, as MLflow's `log_input` takes it."""

    name: str
    digest: str
    """The manifest's; MLflow keeps its first 36 characters, and all of it in the profile."""
    source: str
    """URL without credentials."""
    context: str = "training"
    profile: dict[str, int | str] = Field(default_factory=dict)


class Artifact(BaseModel):
    """A file of the run: its digest, and the revision of the record at which it last changed."""

    sha256: str
    revision: NonNegativeInt


class RunRecord(BaseModel):
    """What is to stand on a server beside the points."""

    run_uuid: str
    parent_uuid: str | None = None
    """The `run_uuid` of the parent run, which is found on the server by its tag."""
    folder: str | None = None
    """Where the record lay when the run was last begun or resumed."""
    tracking_uri: str = ""
    """The server, without secrets, that the training last sent to."""
    started_at: int
    ended_at: int | None = None
    experiment: str
    run_name: str
    status: str = "RUNNING"
    params: dict[str, str] = Field(default_factory=dict)
    tags: dict[str, str] = Field(default_factory=dict)
    artifacts: dict[str, Artifact] = Field(default_factory=dict)
    data_sets: list[DataSetInput] = Field(default_factory=list)
    revision: NonNegativeInt = 0
    changed_at: dict[str, NonNegativeInt] = Field(default_factory=dict)
    """The revision at which each field last changed."""

    @field_validator("artifacts")
    @classmethod
    def _lie_in_the_folder(cls, artifacts: dict[str, Artifact]) -> dict[str, Artifact]:
        """Artifacts are sent to a server, which no other file of this machine may be."""
        for name in artifacts:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
                raise ValueError(f"{name!r} is not a file of the folder artifacts/")
        return artifacts


class Journal:
    """The folder of a tracked run as its readers see it; another process may be writing it."""

    def __init__(self, folder: Path, record: RunRecord) -> None:
        self.folder = folder
        self.record = record
        self.size = _whole_lines(self.points_path)
        """Bytes of whole lines of points."""

    @classmethod
    def read_only(cls, folder: Path) -> Journal:
        """The journal as it stands now; nothing of it is changed.

        Raises:
            UserError: run.json is missing or damaged.
        """
        record = read_record(folder)
        if record is None:
            raise UserError(
                f"{folder} has no {RECORD_NAME}: no run was tracked there",
                fix="give the OUTPUT_DIR of a run",
                code="nothing-tracked",
            )
        return cls(folder, record)

    @property
    def points_path(self) -> Path:
        return self.folder / POINTS_NAME

    def read(self, offset: int, max_points: int) -> tuple[list[Point], int]:
        """Whole lines from byte `offset` with at most `max_points` points in total, and the offset behind them.

        A line with more points than that is returned alone.
        """
        points: list[Point] = []
        with open(self.points_path, "rb") as file:
            file.seek(offset)
            while offset < self.size:
                line = file.readline()
                if not line.endswith(b"\n"):
                    break
                found = parse_line(line) or []
                if points and len(points) + len(found) > max_points:
                    break
                points += found
                offset += len(line)
        return points, offset

    def fault_of_artifact(self, name: str) -> str | None:
        """Why the file of an artifact may or can not be sent; None where it can."""
        path = self.folder / "artifacts" / name
        if not path.resolve().is_relative_to((self.folder / "artifacts").resolve()):
            return "is a link to a file outside the run's artifacts"
        return None if path.is_file() else "is lost"

    def sync(self) -> None:
        """Bring the points to the disk itself, so that a server never knows more than the folder after a crash."""
        storage.flush(self.points_path)


class JournalWriter(Journal):
    """The journal of a run that this process tracks: one thread appends, another sends what stands there."""

    def __init__(self, folder: Path, experiment: str, run_name: str) -> None:
        """Begin the journal of `folder`, or go on with it.

        Raises:
            UserError: run.json is damaged.
            OSError: the folder cannot be written.
        """
        (folder / "artifacts").mkdir(parents=True, exist_ok=True)
        record = read_record(folder) or RunRecord(
            run_uuid=uuid.uuid4().hex, started_at=now(), experiment=experiment, run_name=run_name
        )
        self.copied_from = record.folder if _is_copy(folder, record) else None
        """The folder that this one was copied from, whose run goes on there: this one is a run of its own."""
        if self.copied_from is not None:
            own = {"run_uuid": uuid.uuid4().hex, "run_name": run_name, "params": {}, "tracking_uri": ""}
            record = record.model_copy(update=own)
        record.folder = str(folder.resolve())
        self._lock = threading.RLock()
        self._unwritten = b""
        self._file = os.open(folder / POINTS_NAME, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        super().__init__(folder, record)
        os.ftruncate(self._file, self.size)  # a torn last line; its step is logged again
        self._save(record)  # which also brings the name of the points' file to the disk
        self.last_step: dict[str, int] = {}  # of each key: an earlier or equal step is not recorded again
        self.num_damaged_lines = 0
        with open(self.points_path, "rb") as file:  # what earlier processes wrote
            for line in file:
                points = parse_line(line)
                self.num_damaged_lines += points is None
                for point in points or ():
                    self.last_step[point.key] = max(point.step, self.last_step.get(point.key, -1))

    def append(self, step: int, metrics: dict[str, float]) -> int:
        """Write the values of `step` that are new; returns how many.

        Raises:
            OSError: the disk refuses; the line is kept in memory and written before the next one.
        """
        new = {key: float(value) for key, value in metrics.items() if step > self.last_step.get(key, -1)}
        if new:
            line = json.dumps({"t": now(), "s": step, "m": new}, separators=(",", ":"), ensure_ascii=False)
            self.last_step.update(dict.fromkeys(new, step))
            self._write((line + "\n").encode())
        return len(new)

    def put_artifact(self, name: str, data: bytes) -> None:
        """Keep a file under `name` (a relative path); the same again changes nothing."""
        path = self.folder / "artifacts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data)
        digest = hashlib.sha256(data).hexdigest()
        with self._lock:
            known = self.record.artifacts
            if name not in known or known[name].sha256 != digest:
                artifact = Artifact(sha256=digest, revision=self.record.revision + 1)
                self.update(artifacts={**known, name: artifact})

    def put_data_set(self, data_set: DataSetInput) -> None:
        """Keep a data set that the run reads; the same again changes nothing."""
        with self._lock:
            if data_set not in self.record.data_sets:
                self.update(data_sets=[*self.record.data_sets, data_set])

    def update(self, **changes: object) -> None:
        """Set fields of the record and save it.

        The record is replaced, not changed, and on the disk before the thread that sends can see it: no cursor is ever
        ahead of run.json, unless the disk refuses.
        """
        with self._lock:
            changes = {name: value for name, value in changes.items() if getattr(self.record, name) != value}
            if not changes:
                return
            revision = self.record.revision + 1
            changed_at = self.record.changed_at | dict.fromkeys(changes, revision)
            record = self.record.model_copy(update={**changes, "revision": revision, "changed_at": changed_at})
            try:
                self._save(record)
            finally:
                self.record = record

    def close(self) -> None:
        os.close(self._file)

    def _save(self, record: RunRecord) -> None:
        replace_file(self.folder / RECORD_NAME, record.model_dump_json(indent=1).encode() + b"\n")

    def _write(self, line: bytes) -> None:
        data = self._unwritten + line
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._file, view) :]
        except OSError:
            os.ftruncate(self._file, self.size)
            self._unwritten = data if len(data) <= MAX_UNWRITTEN_BYTES else self._unwritten
            raise
        self._unwritten = b""
        self.size += len(data)


def read_record(folder: Path) -> RunRecord | None:
    """run.json of a tracking folder; None where there is none.

    Raises:
        UserError: it is damaged.
    """
    path = folder / RECORD_NAME
    if not path.exists():
        return None
    try:
        return RunRecord.model_validate_json(path.read_bytes())
    except ValidationError:
        raise UserError(
            f"{path} is damaged, so its MLflow run is unknown",
            fix=f"remove {path}; the metrics of that folder are then sent to a new run",
            code="damaged-tracking-record",
        ) from None


def parse_line(line: bytes) -> list[Point] | None:
    """The points of one line of the journal; None for a damaged one."""
    try:
        value = json.loads(line)
        step, timestamp = int(value["s"]), int(value["t"])
        if not 0 <= step <= _LARGEST or not 0 <= timestamp <= _LARGEST:
            return None
        for key in value["m"]:
            key.encode()  # which a lone surrogate cannot be
        return [Point(str(key), float(number), timestamp, step) for key, number in value["m"].items()]
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return None


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all, after a power failure too."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    temporary.write_bytes(data)
    storage.flush(temporary)
    os.replace(temporary, path)
    storage.flush(path.parent)


def now() -> int:
    """The clock in milliseconds, as MLflow counts."""
    return time.time_ns() // 1_000_000


def _is_copy(folder: Path, record: RunRecord) -> bool:
    """Whether the run went on in another folder, where its record says that it lies, since it was copied from there.

    One that was only staged to another disk, and whose original lies there as it was, is no copy in this sense.
    """
    if record.folder is None:
        return False
    there = Path(record.folder)
    try:
        other = None if there.samefile(folder) else read_record(there)
        went_on = not _begins_with(folder / POINTS_NAME, there / POINTS_NAME)
    except (UserError, OSError):  # it was moved away from there, or nobody can go on with it
        return False
    return other is not None and other.run_uuid == record.run_uuid and went_on


def _begins_with(path: Path, other: Path) -> bool:
    """Whether the file at `path` begins with all that `other` holds; a missing one is empty."""
    if not path.exists():
        return other.stat().st_size == 0
    with open(path, "rb") as file, open(other, "rb") as beginning:
        while piece := beginning.read(1 << 20):
            if file.read(len(piece)) != piece:
                return False
    return True


def _whole_lines(path: Path) -> int:
    """Bytes up to the end of the last whole line; the writing process may be in the middle of one."""
    try:
        with open(path, "rb") as file:
            return sum(len(line) for line in file if line.endswith(b"\n"))
    except FileNotFoundError:
        return 0
