"""Scores of a checkpoint that are computed after it was saved: `scores.json` in its directory.

The file is no part of the checkpoint: nothing that resumes reads it, and it disappears with the directory. While its
state is `pending`, the checkpoint is kept (`trainer/checkpoint/writer.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from data_prep.storage import storage

LATE_SCORES_NAME = "scores.json"


class LateScores(BaseModel):
    """The scores of a checkpoint, or their state."""

    model_config = ConfigDict(allow_inf_nan=False)

    state: Literal["pending", "done", "failed"]
    suite: str
    """Name of the suite that gives them."""
    metrics: dict[str, float] = {}


def read_late_scores(folder: Path) -> LateScores | None:
    """The file of a checkpoint's directory; None where there is none, or it is damaged."""
    try:
        return LateScores.model_validate_json((folder / LATE_SCORES_NAME).read_bytes())
    except (OSError, ValidationError):
        return None


def write_late_scores(folder: Path, scores: LateScores) -> None:
    """Write the file atomically, unless the checkpoint was removed.

    Raises:
        UserError: it cannot be written.
    """
    if folder.is_dir():
        storage.write_bytes(folder / LATE_SCORES_NAME, scores.model_dump_json(indent=1).encode())


def is_pending(folder: Path) -> bool:
    """Whether scores of this checkpoint are still to come."""
    scores = read_late_scores(folder)
    return scores is not None and scores.state == "pending"


def metrics_of(folder: Path) -> dict[str, float]:
    """The scores that were computed after the checkpoint was saved."""
    scores = read_late_scores(folder)
    return {} if scores is None else scores.metrics
