"""Scores of a checkpoint that are computed after it was saved: two files in its directory.

`evaluation.json` has the scores of the run's own evaluation at this step, `scores.json` those of a suite. The files are
no part of the checkpoint: the marker lists neither, and they disappear with the directory. While the state of one is
`pending`, the checkpoint is kept (`trainer/checkpoint/retention.py`), and a run that resumes from it evaluates first.
A store gets copies (`trainer/checkpoint/upload.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from data_prep.base.errors import UserError
from data_prep.storage import storage

EVALUATION_NAME = "evaluation.json"
LATE_SCORES_NAME = "scores.json"
SCORE_FILES = (EVALUATION_NAME, LATE_SCORES_NAME)


class LateScores(BaseModel):
    """The scores of a checkpoint, or their state."""

    model_config = ConfigDict(allow_inf_nan=False)

    state: Literal["pending", "done", "failed"]
    suite: str = ""
    """Name of the suite; empty for the run's own evaluation."""
    metrics: dict[str, float] = {}
    """Scores by metric; for a pending evaluation those computed so far."""
    facts: dict[str, str] = {}
    """How the scores were measured (`trainer/config/comparability.py`); empty for scores of an earlier release."""


def read_late_scores(folder: str | Path, name: str = LATE_SCORES_NAME) -> LateScores | None:
    """Read a file of a checkpoint's directory, on disk or in a store; None if it is missing or damaged.

    Raises:
        UserError: the store cannot be read.
    """
    url = storage.join(folder, name)
    try:
        return LateScores.model_validate_json(storage.read_bytes(url)) if storage.exists(url) else None
    except ValidationError:
        return None
    except UserError:
        if storage.is_remote(url):
            raise
        return None


def write_late_scores(folder: Path, scores: LateScores, name: str = LATE_SCORES_NAME) -> None:
    """Write a file atomically, unless the checkpoint was removed or is a link to another run's.

    Raises:
        UserError: the file cannot be written.
    """
    if folder.is_dir() and not folder.is_symlink():
        storage.write_bytes(folder / name, scores.model_dump_json(indent=1).encode())


def is_pending(folder: str | Path) -> bool:
    """Return whether scores of this checkpoint are pending.

    Raises:
        UserError: the store cannot be read.
    """
    late_scores = (read_late_scores(folder, name) for name in SCORE_FILES)
    return any(scores is not None and scores.state == "pending" for scores in late_scores)


def evaluation_of(folder: str | Path) -> LateScores:
    """Return the scores of the run's own evaluation after the checkpoint was saved, as far as computed; all are finite.

    Raises:
        UserError: the store cannot be read.
    """
    return read_late_scores(folder, EVALUATION_NAME) or LateScores(state="done")


def suite_scores_of(folder: str | Path) -> LateScores:
    """Return the scores of the suite; empty without a suite.

    Raises:
        UserError: the store cannot be read.
    """
    return read_late_scores(folder) or LateScores(state="done")
