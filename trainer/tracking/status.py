"""The state and history of a run on disk, also when the launcher hides them.

`output_dir/status.json` is replaced at every log line, and every `HEARTBEAT_SECONDS` while there is none;
`output_dir/history.jsonl` grows by a line at each start, save, evaluation, suite and end. `Status` and the events are
the schema of both files for writing and reading. Readers ignore other fields.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from data_prep.base.known_secrets import hide_secrets
from trainer.tracking.process_identity import Count, ProcessIdentity, own_identity

STATUS_NAME = "status.json"
HISTORY_NAME = "history.jsonl"
BRANCHES_NAME = "branches.jsonl"

HEARTBEAT_SECONDS = 15.0
"""Longest time between two writes of a run's status, however long its steps take, unless the disk is slow."""
DEAD_AFTER_SECONDS = 120.0
"""A run of another host is dead if its last heartbeat is older: several beats, an NFS cache, clocks that differ."""
_END_SECONDS = 5.0
"""How long the end of a run waits for a write that is under way."""

_LAUNCHED_AT = time.time()
"""About when this process started: before it records anything of a run."""

State = Literal["running", "finished", "stopped", "failed"]
EventName = Literal["started", "saved", "evaluated", "scored", "ended"]
_Time = Annotated[float, Field(ge=0, lt=253_402_300_800)]
"""Seconds since 1970, before the year 10,000."""


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class Status(_Record, ProcessIdentity):
    """The content of status.json; a run that ended before its first step has few of the figures."""

    state: State
    written_at: _Time
    step: Count | None = None
    max_steps: Count = 0
    stage: str | None = None
    branch: dict[str, str | int] | None = None
    """Run, step and stage, for a branch from another run."""
    tokens_seen: Count = 0
    skipped_steps: Count = 0
    world_size: Count = 0
    log_every_steps: Count = 0
    train_seconds: float = 0.0
    seconds_per_step: float | None = None
    seconds_left: float | None = None
    flops_per_device: float | None = None
    metrics: dict[str, float | None] = {}
    evaluation: dict[str, str] = {}
    """How valid/* are measured (`trainer/config/comparability.py`)."""
    cause: str | None = None
    heartbeat_at: _Time | None = None
    doing: str | None = None
    """The operation of the main thread at the last heartbeat, such as "evaluating after step 500"."""
    moved_at: _Time | None = None
    """When the main thread last began an operation, as seen by the heartbeats."""
    patience_seconds: Count = 0
    """Time limit of the operation, if it is unusually long."""

    @property
    def last_sign(self) -> float:
        """When the run last gave a sign of life, in seconds since 1970."""
        return max(self.written_at, self.heartbeat_at or 0.0)


class Activity(Protocol):
    """The operation of the main thread of a run; `marks` grows with each operation."""

    @property
    def marks(self) -> int: ...
    @property
    def doing(self) -> str: ...
    @property
    def patience_seconds(self) -> int: ...


class BranchRecord(_Record):
    """A branch that another run started from a checkpoint of this one: a line of branches.jsonl."""

    step: Count
    stage: str
    output_dir: str


class _Event(_Record):
    """A line of the history."""

    at: _Time
    step: Count


class Started(_Event):
    event: Literal["started"]
    world_size: Count
    device: str = "cpu"
    gpu_hour_price: float | None = None
    launched_at: _Time = 0.0
    """When the process began; 0 if unknown."""
    last_written_at: _Time | None = None


class Saved(_Event):
    event: Literal["saved"]


class Evaluated(_Event):
    event: Literal["evaluated"]
    metrics: dict[str, float | None]


class Scored(_Event):
    """Scores of a suite for the checkpoint of a step."""

    event: Literal["scored"]
    metrics: dict[str, float | None]


class Ended(_Record):
    event: Literal["ended"]
    at: _Time
    state: State
    step: Count | None
    cause: str | None
    launched_at: _Time = 0.0
    last_written_at: _Time | None = None


Event = Started | Saved | Evaluated | Scored | Ended
_EVENT: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="event")])


def log_path(output_dir: Path, rank: int = 0) -> Path:
    """Return the log file of a rank."""
    return Path(output_dir) / "logs" / f"rank-{rank}.log"


def add_branch(run: Path, branch: BranchRecord) -> None:
    """Append a branch to the list in the directory of the run that it started from.

    Raises:
        OSError: the directory cannot be written.
    """
    if branch not in read_branches(run):
        with open(run / BRANCHES_NAME, "a", encoding="utf-8") as file:
            file.write(branch.model_dump_json() + "\n")


def read_branches(run: Path) -> list[BranchRecord]:
    """Return the branches of a run; damaged lines are skipped."""
    try:
        lines = (run / BRANCHES_NAME).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    branches = []
    for line in lines:
        with contextlib.suppress(ValidationError):
            branches.append(BranchRecord.model_validate_json(line))
    return branches


class RunStatus:
    """The status of a run that this process writes, with a heartbeat, from a thread: training never waits for it.

    After `end` only another end is written, as when ranks are lost after the run was finished.
    """

    def __init__(
        self, output_dir: Path, on_error: Callable[[OSError], None], activity: Callable[[], Activity] | None = None
    ) -> None:
        """`on_error` is called with the first error of several writes in a row that fail; the next beat tries again.

        `activity` returns the operation of the main thread, which every heartbeat records.
        """
        self._output_dir, self._on_error, self._activity = Path(output_dir), on_error, activity
        self._seen: Activity | None = None
        self._moved_at = 0.0
        self._latest: dict[str, Any] | None = None
        self._changed = threading.Event()
        self._writing = threading.Lock()
        self._has_ended = False
        self._thread = threading.Thread(target=self._beat_loop, name="status", daemon=True)

    def update(self, values: dict[str, Any]) -> None:
        """Ask the thread to replace the file soon with these values of the running run."""
        # A copy, because training changes the original afterwards.
        self._latest = {"written_at": round(time.time(), 3), **dict(own_identity()), **_finite(values)}
        self._changed.set()
        if self._thread.ident is None:
            self._thread.start()

    def end(self, state: State, cause: str | None, step: int | None) -> None:
        """Write how the run ended, at once, to status and history; without a step it is that of the last status.

        Raises:
            OSError: it cannot be written.
        """
        self._has_ended = True
        self._changed.set()
        held = self._writing.acquire(timeout=_END_SECONDS)
        try:
            if self._latest is not None:
                self._write(state, self._latest)
            record_end(self._output_dir, state, cause, step)
        finally:
            if held:
                self._writing.release()

    def _beat_loop(self) -> None:
        has_failed = False
        while True:
            self._changed.wait(HEARTBEAT_SECONDS)
            self._changed.clear()
            with self._writing:
                if self._has_ended or self._latest is None:
                    return
                try:
                    self._write("running", self._latest)
                    has_failed = False
                except OSError as error:
                    if not has_failed:
                        self._on_error(error)
                    has_failed = True

    def _write(self, state: State, values: dict[str, Any]) -> None:
        write_status(self._output_dir, state, values | {"heartbeat_at": round(time.time(), 3)} | self._operation())

    def _operation(self) -> dict[str, Any]:
        if self._activity is None:
            return {}
        activity = self._activity()
        if self._seen is None or activity.marks != self._seen.marks:
            self._moved_at = round(time.time(), 3)
        self._seen = activity
        return {
            "doing": activity.doing,
            "moved_at": self._moved_at,
            "patience_seconds": activity.patience_seconds,
        }


def write_status(output_dir: Path, state: State, values: dict[str, Any]) -> None:
    """Replace the status file atomically; `values` are of `Status`; `state` is added, and the time where they lack it.

    Raises:
        ValidationError: a value is not what `Status` says.
        OSError: it cannot be written.
    """
    path = Path(output_dir) / STATUS_NAME
    temporary = path.with_name(f".{STATUS_NAME}.{os.getpid()}.{threading.get_native_id()}")
    values = {"state": state, "written_at": round(time.time(), 3), **_finite(values)}
    Status.model_validate(values)
    temporary.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read_status(output_dir: Path) -> Status | None:
    """Return the last written status; None if there is none or it cannot be read (such as after a power loss)."""
    return _read(output_dir)[0]


def _read(output_dir: Path) -> tuple[Status | None, dict[str, Any]]:
    """Return the last written status, and all values of its file unchanged; None and no values if it is unreadable."""
    try:
        values = json.loads((Path(output_dir) / STATUS_NAME).read_text(encoding="utf-8", errors="replace"))
        return Status.model_validate(values), values
    except (OSError, ValueError, RecursionError):
        return None, {}


def add_metrics(output_dir: Path, metrics: Mapping[str, float | None]) -> None:
    """Add metrics to the last written status, if there is one.

    Raises:
        OSError: it cannot be written.
    """
    status, values = _read(output_dir)
    if status is not None:
        write_status(output_dir, status.state, values | {"metrics": {**values.get("metrics", {}), **metrics}})


def append_history(output_dir: Path, event: EventName, values: dict[str, Any]) -> None:
    """Add a line to the history; `values` are those of the event, whose name and time (`at`) are added.

    Raises:
        ValidationError: a value is not what the event has.
        OSError: it cannot be written.
    """
    values = {"at": round(time.time(), 3), "event": event, **_finite(values)}
    _EVENT.validate_python(values)
    line = json.dumps(values, ensure_ascii=False)
    with open(Path(output_dir) / HISTORY_NAME, "a", encoding="utf-8") as file:
        file.write(line + "\n")


def read_history(output_dir: Path) -> list[Event]:
    """Return the lines of the history, oldest first, without torn ones; empty without a readable file.

    Only "\\n" ends a line: a cause may contain U+2028 and the like, which JSON does not escape.
    """
    try:
        lines = (Path(output_dir) / HISTORY_NAME).read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return []
    events = []
    for line in lines:
        try:
            events.append(_EVENT.validate_python(json.loads(line)))
        except (ValueError, RecursionError):
            continue  # a process was killed while it wrote
    return events


def record_end(output_dir: Path, state: State, cause: str | None, step: int | None = None) -> None:
    """Record in status and history how a run ended; `cause` is a text, and None after all steps.

    A start may end before it recorded `started`, and the start before may have recorded no end. So the end has the time
    at which this process started and the time of the last status, which show whose end it is.
    """
    cause = cause and hide_secrets(cause)
    status, values = _read(output_dir)
    if step is None and status is not None:
        step = status.step
    values = {name: value for name, value in values.items() if name not in ("state", "written_at")}
    write_status(output_dir, state, values | {"step": step, "cause": cause})
    end = {"state": state, "step": step, "cause": cause, "launched_at": round(_LAUNCHED_AT, 3)}
    append_history(output_dir, "ended", end | {"last_written_at": status and status.last_sign})


def record_loss_of_writer(output_dir: Path, failure: str) -> None:
    """Record the loss of rank 0, which writes the status, for it; nothing where the failure blames another rank.

    The failure has the host and process of each lost rank; a status of another process, as of a later start, is left.
    """
    status = read_status(output_dir)
    if status and status.state == "running" and f"({status.host}, process {status.pid};" in failure:
        record_end(output_dir, "failed", failure)


def _finite(value: Any) -> Any:
    """Return the values with null for NaN and infinities, which JSON cannot write."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
