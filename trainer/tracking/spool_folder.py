"""The folder of a tracked run as whoever sends it sees it: what is to stand on a server, and what stands there.

points.jsonl   {"t": milliseconds, "s": step, "m": {key: value}}, a line a step; the queue and the archive at once
artifacts/     files, as they are to stand in the run
run.json       identity (a tag written before the run is created), parameters, tags, status; what the training sent
synced.json    what launch/sync_tracking.py sent
"""

from __future__ import annotations

import json
import os
import threading
from abc import ABC, abstractmethod
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from pydantic import BaseModel, Field, NonNegativeInt, ValidationError, field_validator

from data_prep.base.errors import UserError
from data_prep.storage import storage

GIT_TAG = "clozeworks.git_revision"
LINEAGE_TAG = "clozeworks.data_lineage"
"""Tag of the run with the manifest digests of all data that its weights saw, parted by commas."""

POINTS_NAME = "points.jsonl"
RECORD_NAME = "run.json"
SYNCED_NAME = "synced.json"
_LARGEST = (1 << 63) - 1  # step or time that a server takes


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


class Delivered(BaseModel):
    """What one server is known to have."""

    tracking_uri: str = ""
    experiment_id: str | None = None
    run_id: str | None = None
    sent_bytes: NonNegativeInt = 0
    params: list[str] = Field(default_factory=list)
    tags: dict[str, str] = Field(default_factory=dict)
    artifacts: dict[str, str] = Field(default_factory=dict)
    data_sets: list[str] = Field(default_factory=list)
    parent_run_id: str | None = None
    status: str = ""


class RunRecord(BaseModel):
    """What is to stand on the server, and what stands there already."""

    run_uuid: str
    parent_uuid: str | None = None
    """The `run_uuid` of the run that this one stands under; on the server that one is found by its tag."""
    folder: str | None = None
    """Where the record lay when the run was last begun or resumed."""
    started_at: int
    ended_at: int | None = None
    experiment: str
    run_name: str
    status: str = "RUNNING"
    params: dict[str, str] = Field(default_factory=dict)
    tags: dict[str, str] = Field(default_factory=dict)
    artifacts: dict[str, str] = Field(default_factory=dict)
    data_sets: list[DataSetInput] = Field(default_factory=list)
    delivered: Delivered = Field(default_factory=Delivered)

    @field_validator("artifacts")
    @classmethod
    def _lie_in_the_folder(cls, artifacts: dict[str, str]) -> dict[str, str]:
        """They are sent to a server, which no other file of this machine may be."""
        for name in artifacts:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
                raise ValueError(f"{name!r} is no file of the folder artifacts/")
        return artifacts


class SpoolFolder(ABC):
    """What is sent, line by line from where the server is known to stand."""

    def __init__(self, folder: Path, record: RunRecord) -> None:
        self.folder = folder
        self.record = record
        self.size = 0
        """Bytes of whole lines of points."""

    @property
    def points_path(self) -> Path:
        return self.folder / POINTS_NAME

    @property
    def unsent_bytes(self) -> int:
        return self.size - self.record.delivered.sent_bytes

    def read(self, offset: int, max_points: int) -> tuple[list[Point], int]:
        """Whole lines from byte `offset` of at most `max_points` points together, and the offset behind them.

        A line of more points than that is returned alone.
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
            return "is a link that leads out of the run's artifacts"
        return None if path.is_file() else "is lost"

    @abstractmethod
    def sync(self) -> None:
        """Bring the points to the disk itself, so that a server never knows more than the folder after a crash."""

    @abstractmethod
    def deliver(self, **changes: object) -> None:
        """Note what the server has now and save it."""


class SyncedFolder(SpoolFolder):
    """The folder of a run that another process may be writing: nothing of that process's files is changed."""

    def __init__(self, folder: Path, tracking_uri: str) -> None:
        """`tracking_uri` (without secrets) is where it goes.

        Raises:
            UserError: run.json is missing or damaged.
        """
        record = read_record(folder)
        if record is None:
            raise UserError(f"{folder} holds no {RECORD_NAME}, so no run was tracked there; give a run's OUTPUT_DIR")
        super().__init__(folder, record)
        synced = _read_synced(folder)
        deliveries = [each for each in (synced, record.delivered) if each is not None]
        known = [each for each in deliveries if is_same_address(each.tracking_uri, tracking_uri)]
        record.delivered = max(known, key=lambda each: each.sent_bytes, default=Delivered())
        self.size = _whole_lines(self.points_path)
        if record.delivered.sent_bytes > self.size:  # the folder was restored from an older copy
            record.delivered.sent_bytes = 0

    def sync(self) -> None:
        """The writing process does it."""

    def deliver(self, **changes: object) -> None:
        for name, value in changes.items():
            setattr(self.record.delivered, name, value)
        replace_file(self.folder / SYNCED_NAME, self.record.delivered.model_dump_json(indent=1).encode() + b"\n")


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
            f"{path} is damaged, so the MLflow run of this folder cannot be found again; remove it, and the "
            "points kept beside it are sent to a new run"
        ) from None


def is_same_address(recorded: str, address: str) -> bool:
    """Whether both name one server; earlier releases recorded `***@` for a user, and the query."""
    return storage.hide_secrets(recorded) == storage.hide_secrets(address)


def parse_line(line: bytes) -> list[Point] | None:
    """The points of one line of the spool; None for a damaged one."""
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


def _read_synced(folder: Path) -> Delivered | None:
    try:
        return Delivered.model_validate_json((folder / SYNCED_NAME).read_bytes())
    except (OSError, ValidationError):
        return None  # all of it is sent again, which changes nothing on the server


def _whole_lines(path: Path) -> int:
    """Bytes up to the end of the last whole line; the writing process may be in the middle of one."""
    try:
        with open(path, "rb") as file:
            return sum(len(line) for line in file if line.endswith(b"\n"))
    except FileNotFoundError:
        return 0
