"""Journal of a tracked run: everything that a server gets is stored on disk first.

points.jsonl   the journal: {"t": milliseconds, "s": step, "m": {key: value}}, one line per step, append-only;
               the number of a line in its sequence is the byte at which it ends
run.json       identity (a tag of the run on the server), parameters, tags, status: replaced as a whole, and numbered
               by `revision`, which every change raises
artifacts/     files of the run, under their artifact paths
cursors/       one file per server: how much it has received (trainer/tracking/delivery.py)

The folder is all that a delivery needs: no unsent value is in memory only.
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

from data_prep.base.errors import UsageError, UserError
from data_prep.storage import storage

ENTROPY_PARAM = "data.unigram_entropy_nats"
"""Parameter with the unigram entropy of the valid split, the baseline of the MLM loss."""
GIT_TAG = "clozeworks.git_revision"
LINEAGE_TAG = "clozeworks.data_lineage"
"""Tag of the run with the manifest digests of all data that its weights saw, separated by commas."""
ADOPTED_TAG = "clozeworks.adopted"
"""Tag of the run that says how its initial weights were made of those of `init_from`."""
TEACHERS_TAG = "clozeworks.teacher_sha256"
"""Tag of the run with the sha256 of every teacher of its weights in order, separated by commas."""

POINTS_NAME = "points.jsonl"
RECORD_NAME = "run.json"
CURSORS_NAME = "cursors"
LATE_KEYS = "suite/"
"""Start of the keys whose steps may come out of order: a suite that failed is tried again later."""
MAX_UNWRITTEN_BYTES = 16 << 20
_LARGEST = (1 << 63) - 1  # step or time that a server accepts


class Point(NamedTuple):
    """Value of a curve; `timestamp` in milliseconds is part of its identity on a server."""

    key: str
    value: float
    timestamp: int
    step: int


class DataSetInput(BaseModel):
    """Data set that the run reads, for MLflow's `log_input`."""

    name: str
    digest: str
    """Digest of the manifest; MLflow keeps the first 36 characters, and all of them in the profile."""
    source: str
    """URL without credentials."""
    context: str = "training"
    profile: dict[str, int | str] = Field(default_factory=dict)


class Artifact(BaseModel):
    """File of the run: its digest, and the revision of the record at which it last changed."""

    sha256: str
    revision: NonNegativeInt


class RunRecord(BaseModel):
    """Contents of run.json: everything that a server gets except the points."""

    run_uuid: str
    parent_uuid: str | None = None
    """`run_uuid` of the parent run, which is found on the server by its tag."""
    folder: str | None = None
    """Path of the record when the run was last started or resumed."""
    tracking_uri: str = ""
    """Server, without secrets, that the training last sent to."""
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
    """Revision at which each field last changed."""

    @field_validator("artifacts")
    @classmethod
    def _lie_in_the_folder(cls, artifacts: dict[str, Artifact]) -> dict[str, Artifact]:
        """Check a path: artifacts are sent to a server, and other files of this machine must not be."""
        for name in artifacts:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
                raise ValueError(f"{name!r} is not a file of the folder artifacts/")
        return artifacts


class Journal:
    """Read-only view of the folder of a tracked run; another process may be writing it."""

    def __init__(self, folder: Path, record: RunRecord) -> None:
        self.folder = folder
        self.record = record
        self.size = _whole_lines(self.points_path)
        """Number of bytes of complete lines of points."""

    @classmethod
    def read_only(cls, folder: Path) -> Journal:
        """Open the journal without changing it.

        Raises:
            UserError: run.json is missing or damaged.
        """
        record = read_record(folder)
        if record is None:
            raise UsageError(
                f"{folder} has no {RECORD_NAME}: no run was tracked there",
                fix="give the OUTPUT_DIR of a run",
                code="nothing-tracked",
            )
        return cls(folder, record)

    @property
    def points_path(self) -> Path:
        return self.folder / POINTS_NAME

    def read(self, offset: int, max_points: int) -> tuple[list[Point], int]:
        """Return complete lines from byte `offset` with at most `max_points` points, and the offset after them.

        A line with more points than that is returned alone.
        """
        points: list[Point] = []
        with open(self.points_path, "rb") as file:
            file.seek(offset)
            while offset < self.size:
                line = file.readline()
                if not line.endswith(b"\n"):
                    break
                records = parse_line(line) or []
                if points and len(points) + len(records) > max_points:
                    break
                points += records
                offset += len(line)
        return points, offset

    def fault_of_artifact(self, name: str) -> str | None:
        """Return why the file of an artifact must not or cannot be sent; None if it can."""
        path = self.folder / "artifacts" / name
        if not path.resolve().is_relative_to((self.folder / "artifacts").resolve()):
            return "is a link to a file outside the run's artifacts"
        return None if path.is_file() else "is lost"

    def sync(self) -> None:
        """Flush the points to the disk, so that a server never has more than the folder after a crash."""
        storage.flush(self.points_path)


class JournalWriter(Journal):
    """Journal of a run that this process tracks: one thread appends, another sends."""

    def __init__(self, folder: Path, experiment: str, run_name: str) -> None:
        """Start the journal of `folder`, or continue it.

        Raises:
            UserError: run.json is damaged.
            OSError: the folder cannot be written.
        """
        (folder / "artifacts").mkdir(parents=True, exist_ok=True)
        record = read_record(folder) or RunRecord(
            run_uuid=uuid.uuid4().hex, started_at=now(), experiment=experiment, run_name=run_name
        )
        self.copied_from = record.folder if _is_copy(folder, record) else None
        """Folder that this one was copied from, if its run continues there: this one is then a separate run."""
        if self.copied_from is not None:
            own = {"run_uuid": uuid.uuid4().hex, "run_name": run_name, "params": {}, "tracking_uri": ""}
            record = record.model_copy(update=own)
        record.folder = str(folder.resolve())
        self._lock = threading.RLock()
        self._unwritten = b""
        self._file = os.open(folder / POINTS_NAME, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        super().__init__(folder, record)
        os.ftruncate(self._file, self.size)  # a torn last line; its step is logged again
        self._save(record)  # which also flushes the name of the file of points to the disk
        self.last_step: dict[str, int] = {}  # by key: an earlier or equal step is not recorded again
        self._late: set[tuple[str, int]] = set()  # key and step of `LATE_KEYS`
        self.num_damaged_lines = 0
        with open(self.points_path, "rb") as file:  # written by earlier processes
            for line in file:
                points = parse_line(line)
                self.num_damaged_lines += points is None
                for point in points or ():
                    self._note(point.key, point.step)

    def append(self, step: int, metrics: dict[str, float]) -> int:
        """Write the new values of `step`; return their number.

        Raises:
            OSError: the disk cannot be written; the line stays in memory and is written before the next one.
        """
        new = {key: float(value) for key, value in metrics.items() if self._is_new(key, step)}
        if new:
            line = json.dumps({"t": now(), "s": step, "m": new}, separators=(",", ":"), ensure_ascii=False)
            for key in new:
                self._note(key, step)
            self._write((line + "\n").encode())
        return len(new)

    def _is_new(self, key: str, step: int) -> bool:
        return (key, step) not in self._late if key.startswith(LATE_KEYS) else step > self.last_step.get(key, -1)

    def _note(self, key: str, step: int) -> None:
        if key.startswith(LATE_KEYS):
            self._late.add((key, step))
        else:
            self.last_step[key] = max(step, self.last_step.get(key, -1))

    def put_artifact(self, name: str, data: bytes) -> None:
        """Store a file under `name` (a relative path); storing the same contents again has no effect."""
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
        """Record a data set that the run reads; recording it again has no effect."""
        with self._lock:
            if data_set not in self.record.data_sets:
                self.update(data_sets=[*self.record.data_sets, data_set])

    def update(self, **changes: object) -> None:
        """Set fields of the record and save it.

        The record is replaced, not modified, and on disk before the sending thread can read it: no cursor is ahead of
        run.json, unless the disk cannot be written.
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
    """Read run.json of a tracking folder; return None if there is none.

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
    """Parse the points of one line of the journal; return None for a damaged line."""
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
    """Write a file atomically and durably, also across a power failure."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    temporary.write_bytes(data)
    storage.flush(temporary)
    os.replace(temporary, path)
    storage.flush(path.parent)


def now() -> int:
    """Return the time in milliseconds since 1970, as in MLflow."""
    return time.time_ns() // 1_000_000


def _is_copy(folder: Path, record: RunRecord) -> bool:
    """Return whether this folder is a copy whose run has continued in the folder that its record names.

    A folder that was staged to another disk is not a copy in this sense while the original is unchanged.
    """
    if record.folder is None:
        return False
    there = Path(record.folder)
    try:
        other = None if there.samefile(folder) else read_record(there)
        has_continued = not _begins_with(folder / POINTS_NAME, there / POINTS_NAME)
    except (UserError, OSError):  # it was moved away from there, or cannot be continued there
        return False
    return other is not None and other.run_uuid == record.run_uuid and has_continued


def _begins_with(path: Path, other: Path) -> bool:
    """Return whether the file at `path` begins with the contents of `other`; a missing file is empty."""
    if not path.exists():
        return other.stat().st_size == 0
    with open(path, "rb") as file, open(other, "rb") as prefix:
        while piece := prefix.read(1 << 20):
            if file.read(len(piece)) != piece:
                return False
    return True


def _whole_lines(path: Path) -> int:
    """Return the number of bytes up to the last complete line; another process may be writing the next one."""
    try:
        with open(path, "rb") as file:
            return sum(len(line) for line in file if line.endswith(b"\n"))
    except FileNotFoundError:
        return 0
