"""Where a run stands and what has happened to it, on disk, also where the launcher hides it.

`output_dir/status.json` is replaced at every log line; `output_dir/history.jsonl` grows by a line at each start, save,
evaluation and end.
"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from trainer.watching.status_records import Event, State, is_event, is_status

STATUS_NAME = "status.json"
HISTORY_NAME = "history.jsonl"

_LAUNCHED_AT = time.time()
"""Of this process, nearly: before anything that it notes of a run."""


def write_status(output_dir: Path, state: State, values: dict[str, Any]) -> None:
    """Replace the status file atomically; `values` are JSON, `state` and the time are added."""
    path = Path(output_dir) / STATUS_NAME
    temporary = path.with_name(f".{STATUS_NAME}.{os.getpid()}")
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
    append_history(output_dir, "ended", end | {"last_written_at": status.get("written_at")})


def _finite(value: Any) -> Any:
    """The same with null for NaN and infinities, which JSON has no words for."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
