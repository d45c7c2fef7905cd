"""`output_dir/status.json`: where a run stands, for people and batch scripts, also when the launcher hides it."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any, Literal

STATUS_NAME = "status.json"
State = Literal["running", "finished", "stopped", "failed"]


def write_status(output_dir: Path, state: State, values: dict[str, Any]) -> None:
    """Replace the status file atomically; `values` are JSON, `state` and the time are added."""
    path = Path(output_dir) / STATUS_NAME
    temporary = path.with_name(f".{STATUS_NAME}.{os.getpid()}")
    text = json.dumps({"state": state, "written_at": round(time.time(), 3), **_finite(values)}, indent=1)
    temporary.write_text(text + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read_status(output_dir: Path) -> dict[str, Any] | None:
    """The status last written; None where there is none."""
    try:
        return json.loads((Path(output_dir) / STATUS_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def _finite(value: Any) -> Any:
    """The same with null for NaN and infinities, which JSON has no words for."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
