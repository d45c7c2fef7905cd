"""The local record of a tracked run: every point and text is on disk here before a server is told.

    points.jsonl   {"t": milliseconds, "s": step, "m": {key: value}}, appended; the queue and the archive at once
    artifacts/     texts, as they are to stand in the run
    run.json       identity (a tag written before the run is created), parameters, tags, status; what a server has

Whoever has the folder can send it: nothing of the queue lives in memory only.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import uuid
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, Field, ValidationError

from data_prep.errors import UserError

MAX_UNWRITTEN_BYTES = 16 << 20


class Point(NamedTuple):
    """One value of a curve; `timestamp` in milliseconds is part of its identity on a server."""

    key: str
    value: float
    timestamp: int
    step: int


class Delivered(BaseModel):
    """What one server is known to have."""

    tracking_uri: str = ""
    experiment_id: str | None = None
    run_id: str | None = None
    sent_bytes: int = 0
    params: list[str] = Field(default_factory=list)
    tags: dict[str, str] = Field(default_factory=dict)
    artifacts: dict[str, str] = Field(default_factory=dict)
    status: str = ""


class RunRecord(BaseModel):
    """What is to stand on the server, and what stands there already."""

    run_uuid: str
    started_at: int
    experiment: str
    run_name: str
    status: str = "RUNNING"
    params: dict[str, str] = Field(default_factory=dict)
    tags: dict[str, str] = Field(default_factory=dict)
    artifacts: dict[str, str] = Field(default_factory=dict)
    delivered: Delivered = Field(default_factory=Delivered)


class Spool:
    """The folder of one run: opened by one process, appended to by one thread, read by another."""

    def __init__(self, folder: Path, experiment: str, run_name: str) -> None:
        self.folder = folder
        self.last_step: dict[str, int] = {}  # of every key: what lies at or before it is not taken again
        self.num_damaged_lines = 0
        self._lock = threading.RLock()
        self._unwritten = b""
        (folder / "artifacts").mkdir(parents=True, exist_ok=True)
        self.record = self._read_record() or RunRecord(
            run_uuid=uuid.uuid4().hex, started_at=now(), experiment=experiment, run_name=run_name
        )
        self.save(durable=True)
        self._file = os.open(self.points_path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self.size = self._recover()

    @property
    def points_path(self) -> Path:
        return self.folder / "points.jsonl"

    @property
    def unsent_bytes(self) -> int:
        return self.size - self.record.delivered.sent_bytes

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

    def sync(self) -> None:
        """Bring the points to the disk itself, so that a server never knows more than the folder after a crash."""
        os.fsync(self._file)

    def put_artifact(self, name: str, text: str) -> None:
        """Keep a text under `name` (a relative path); the same text again changes nothing."""
        path = self.folder / "artifacts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, text.encode(), durable=False)
        with self._lock:
            digest = hashlib.sha256(text.encode()).hexdigest()
            self.update(artifacts={**self.record.artifacts, name: digest})

    def update(self, **changes: object) -> None:
        """Set fields of the record and save it."""
        with self._lock:
            for name, value in changes.items():
                setattr(self.record, name, value)
            self.save()

    def deliver(self, **changes: object) -> None:
        """Note what the server has now and save it."""
        with self._lock:
            for name, value in changes.items():
                setattr(self.record.delivered, name, value)
            self.save()

    def save(self, durable: bool = False) -> None:
        with self._lock:
            _replace(self.folder / "run.json", self.record.model_dump_json(indent=1).encode() + b"\n", durable)

    def close(self) -> None:
        os.close(self._file)

    def _read_record(self) -> RunRecord | None:
        path = self.folder / "run.json"
        if not path.exists():
            return None
        try:
            return RunRecord.model_validate_json(path.read_bytes())
        except ValidationError:
            raise UserError(
                f"{path} is damaged, so the MLflow run of this folder cannot be found again; remove it, and the "
                "points kept beside it are sent to a new run"
            ) from None

    def _recover(self) -> int:
        """Read what earlier processes wrote, cut off a torn last line, and return the size in bytes."""
        size = 0
        with open(self.points_path, "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                size += len(line)
                points = parse_line(line)
                self.num_damaged_lines += points is None
                for point in points or ():
                    self.last_step[point.key] = max(point.step, self.last_step.get(point.key, -1))
        os.ftruncate(self._file, size)
        if self.record.delivered.sent_bytes > size:  # the folder was restored from an older copy
            self.record.delivered.sent_bytes = 0
        return size

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


def parse_line(line: bytes) -> list[Point] | None:
    """The points of one line of the spool; None for a damaged one."""
    try:
        value = json.loads(line)
        step, timestamp = int(value["s"]), int(value["t"])
        return [Point(str(key), float(number), timestamp, step) for key, number in value["m"].items()]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def now() -> int:
    """The clock in milliseconds, as MLflow counts."""
    return time.time_ns() // 1_000_000


def _replace(path: Path, data: bytes, durable: bool) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(temporary, path)
