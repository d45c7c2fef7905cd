"""Where a run stands and what has happened to it, on disk, also where the launcher hides it.

`output_dir/status.json` is replaced at every log line, and every `HEARTBEAT_SECONDS` while there is none;
`output_dir/history.jsonl` grows by a line at each start, save, evaluation and end.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.metrics.process_identity import own_identity
from trainer.metrics.status_records import Event, State, is_event, is_status

STATUS_NAME = "status.json"
HISTORY_NAME = "history.jsonl"

HEARTBEAT_SECONDS = 15.0
"""At most so long passes between two writes of a run's status, whatever its steps take, unless the disk is slow."""
DEAD_AFTER_SECONDS = 120.0
"""A run of another host is dead whose last heartbeat is older: several beats, a cache of NFS, clocks that differ."""
_END_SECONDS = 5.0
"""How long the end of a run waits for a write that is under way."""

_LAUNCHED_AT = time.time()
"""Of this process, nearly: before anything that it notes of a run."""


class RunStatus:
    """The status of a run that this process writes, with a heartbeat, from a thread: training never waits for it.

    After `end` nothing is written but another end, as where ranks are lost after the run was finished.
    """

    def __init__(self, output_dir: Path, on_error: Callable[[OSError], None]) -> None:
        """`on_error` is called with the first error of several writes in a row that fail; the next beat tries again."""
        self._output_dir, self._on_error = Path(output_dir), on_error
        self._latest: tuple[State, dict[str, Any]] | None = None
        self._changed = threading.Event()
        self._writing = threading.Lock()
        self._has_ended = False
        self._thread = threading.Thread(target=self._beat_loop, name="status", daemon=True)

    def update(self, state: State, values: dict[str, Any]) -> None:
        """Have the thread replace the file with these values soon."""
        # A copy: training goes on to change what it has given.
        self._latest = (state, {"written_at": round(time.time(), 3), **own_identity(), **_finite(values)})
        self._changed.set()
        if self._thread.ident is None:
            self._thread.start()

    def end(self, state: State, cause: str | None, step: int) -> None:
        """Write how the run ended, at once, to status and history.

        Raises:
            OSError: it cannot be written.
        """
        self._has_ended = True
        self._changed.set()
        held = self._writing.acquire(timeout=_END_SECONDS)
        try:
            if self._latest is not None:
                self._write(state, self._latest[1])
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
                    self._write(*self._latest)
                    has_failed = False
                except OSError as error:
                    if not has_failed:
                        self._on_error(error)
                    has_failed = True

    def _write(self, state: State, values: dict[str, Any]) -> None:
        write_status(self._output_dir, state, values | {"heartbeat_at": round(time.time(), 3)})


def write_status(output_dir: Path, state: State, values: dict[str, Any]) -> None:
    """Replace the status file atomically; `values` are JSON, `state` is added, and the time where they lack it."""
    path = Path(output_dir) / STATUS_NAME
    temporary = path.with_name(f".{STATUS_NAME}.{os.getpid()}.{threading.get_native_id()}")
    text = json.dumps({"state": state, "written_at": round(time.time(), 3), **_finite(values)}, indent=1)
    temporary.write_text(text + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read_status(output_dir: Path) -> dict[str, Any] | None:
    """The status last written; None where there is none, or none that can be read (as after the loss of power)."""
    try:
        status = json.loads((Path(output_dir) / STATUS_NAME).read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        return None
    return status if is_status(status) else None


def append_history(output_dir: Path, event: Event, values: dict[str, Any]) -> None:
    """Add a line to the history; `values` are JSON, `event` and the time (`at`, seconds since 1970) are added."""
    line = json.dumps({"at": round(time.time(), 3), "event": event, **_finite(values)}, ensure_ascii=False)
    with open(Path(output_dir) / HISTORY_NAME, "a", encoding="utf-8") as file:
        file.write(line + "\n")


def read_history(output_dir: Path) -> list[dict[str, Any]]:
    """The lines of the history, oldest first; torn ones are left out, and without a readable file there are none.

    Only "\\n" ends a line: a cause may hold U+2028 and the like, which stand in JSON as they are.
    """
    try:
        lines = (Path(output_dir) / HISTORY_NAME).read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return []
    events = []
    for line in lines:
        try:
            events.append(json.loads(line))
        except (ValueError, RecursionError):
            continue  # a process was killed while it wrote
    return [event for event in events if is_event(event)]


def record_end(output_dir: Path, state: State, cause: str | None, step: int | None = None) -> None:
    """Note in status and history how a run ended; `cause` in words, None for all steps done.

    A start may end before it noted `started`; so that its end is not taken for that of the start before, which may have
    ended without a word, it says since when it ran, and when the last status was written.
    """
    status = read_status(output_dir) or {}
    step = status.get("step") if step is None else step
    values = {name: value for name, value in status.items() if name not in ("state", "written_at")}
    write_status(output_dir, state, values | {"step": step, "cause": cause})
    end = {"state": state, "step": step, "cause": cause, "launched_at": round(_LAUNCHED_AT, 3)}
    append_history(output_dir, "ended", end | {"last_written_at": last_sign(status)})


def record_loss_of_writer(output_dir: Path, verdict: str) -> None:
    """Note the loss of rank 0, which writes the status, in its place; nothing where the verdict blames another rank.

    The verdict has the host and process of each lost rank; a status of another process, as of a later start, is left.
    """
    status = read_status(output_dir) or {}
    writer = f"({status.get('host')}, process {status.get('pid')};"
    if status.get("state") == "running" and writer in verdict:
        record_end(output_dir, "failed", verdict)


def last_sign(status: dict[str, Any]) -> float | None:
    """When the run of a status last gave a sign of life, in seconds since 1970; None where it gave none."""
    signs = [at for at in (status.get("written_at"), status.get("heartbeat_at")) if at is not None]
    return max(signs, default=None)


def _finite(value: Any) -> Any:
    """The same with null for NaN and infinities, which JSON has no words for."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
