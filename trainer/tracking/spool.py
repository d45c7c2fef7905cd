"""The local record of a tracked run: every point and file is on disk here before a server is told.

The layout is told in `trainer/tracking/spool_folder.py`. Whoever has the folder can send it: nothing of the queue lives
in memory only.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import uuid
from pathlib import Path

from data_prep.base.errors import UserError
from trainer.tracking.spool_folder import (
    POINTS_NAME,
    RECORD_NAME,
    SYNCED_NAME,
    DataSetInput,
    Delivered,
    RunRecord,
    SpoolFolder,
    parse_line,
    read_record,
    replace_file,
)

MAX_UNWRITTEN_BYTES = 16 << 20


class Spool(SpoolFolder):
    """The folder of one run: opened by one process, appended to by one thread, read by another."""

    def __init__(self, folder: Path, experiment: str, run_name: str) -> None:
        (folder / "artifacts").mkdir(parents=True, exist_ok=True)
        record = read_record(folder) or RunRecord(
            run_uuid=uuid.uuid4().hex, started_at=now(), experiment=experiment, run_name=run_name
        )
        self.copied_from = record.folder if _is_copy(folder, record) else None
        """The folder that this one was copied from, whose run goes on there: this one is a run of its own."""
        if self.copied_from is not None:
            own = {"run_uuid": uuid.uuid4().hex, "run_name": run_name, "params": {}, "delivered": Delivered()}
            record = record.model_copy(update=own)
            (folder / SYNCED_NAME).unlink(missing_ok=True)
        record.folder = str(folder.resolve())
        super().__init__(folder, record)
        self.last_step: dict[str, int] = {}  # of every key: what lies at or before it is not taken again
        self.num_damaged_lines = 0
        self._lock = threading.RLock()
        self._unwritten = b""
        self._file = os.open(self.points_path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self.save()  # which also brings the name of the points' file to the disk
        self.size = self._recover()

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

    def sync(self) -> None:
        """Bring the points to the disk itself, so that a server never knows more than the folder after a crash."""
        os.fsync(self._file)

    def put_artifact(self, name: str, data: bytes) -> None:
        """Keep a file under `name` (a relative path); the same again changes nothing."""
        path = self.folder / "artifacts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data)
        with self._lock:
            self.update(artifacts={**self.record.artifacts, name: hashlib.sha256(data).hexdigest()})

    def put_data_set(self, data_set: DataSetInput) -> None:
        """Keep a data set that the run reads; the same again changes nothing."""
        with self._lock:
            if data_set not in self.record.data_sets:
                self.update(data_sets=[*self.record.data_sets, data_set])

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

    def save(self) -> None:
        with self._lock:
            replace_file(self.folder / RECORD_NAME, self.record.model_dump_json(indent=1).encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)

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


def now() -> int:
    """The clock in milliseconds, as MLflow counts."""
    return time.time_ns() // 1_000_000
