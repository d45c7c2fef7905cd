"""Scores of a checkpoint that are computed after it was saved, and the checkpoints that are kept because of scores.

Two files in the directory of the checkpoint have the scores: `evaluation.json` those of the run's own evaluation at
this step, `scores.json` those of a suite. The files are not part of the checkpoint: the marker lists neither, and they
disappear with the directory. While the state of one is `pending`, the checkpoint is kept, and a run that resumes from
it evaluates first. A store gets copies (`trainer/checkpoint/upload.py`).

One rule says for the disk and for the store which checkpoints a newer one makes superfluous. Functions that read from a
store raise UserError if it cannot be read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from data_prep.base.errors import UserError
from data_prep.storage import storage
from trainer.checkpoint.format import CheckpointFolder
from trainer.config.comparability import digest_for
from trainer.config.run_settings import CheckpointSettings

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
    """Read a file of a checkpoint's directory, on disk or in a store; None if it is missing or damaged."""
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
    """Return whether scores of this checkpoint are pending."""
    late_scores = (read_late_scores(folder, name) for name in SCORE_FILES)
    return any(scores is not None and scores.state == "pending" for scores in late_scores)


def evaluation_of(folder: str | Path) -> LateScores:
    """Return the scores of the run's own evaluation after the save, as far as computed; all are finite."""
    return read_late_scores(folder, EVALUATION_NAME) or LateScores(state="done")


def suite_scores_of(folder: str | Path) -> LateScores:
    """Return the scores of the suite; empty without a suite."""
    return read_late_scores(folder) or LateScores(state="done")


def superfluous_steps(
    complete: Mapping[int, float | None],
    newest: int,
    settings: CheckpointSettings,
    evaluations: Mapping[int, str] | None = None,
) -> set[int]:
    """Return the steps to remove now that `newest` is complete.

    The rule keeps the newest step, the `keep_last` newest, multiples of `keep_every_steps`, and the `keep_best` best of
    each way of measuring, since scores that were measured differently do not compare. Steps later than `newest` belong
    to a branch that the run has left (they were damaged and skipped, or the run went back on purpose) and are removed.

    Args:
        complete: the complete checkpoints by step, each with its `best_metric`.
        evaluations: how the score of each was measured; by default all alike.
    """
    current = sorted((step for step in complete if step <= newest), reverse=True)
    kept = {newest, *current[: settings.keep_last]}
    if settings.keep_every_steps is not None:
        kept |= {step for step in current if step % settings.keep_every_steps == 0}
    sign = 1 if settings.best_metric.endswith("loss") else -1
    alike: dict[str, list[tuple[float, int]]] = {}
    for step in current:
        if (value := complete[step]) is not None:
            alike.setdefault((evaluations or {}).get(step, ""), []).append((sign * value, -step))
    kept |= {-step for evaluated in alike.values() for _, step in sorted(evaluated)[: settings.keep_best]}
    return set(complete) - kept


def superfluous_in(url: str | Path, complete: Sequence[int], newest: int, settings: CheckpointSettings) -> set[int]:
    """Return `superfluous_steps` of a folder of checkpoints, on disk or in a store.

    An older checkpoint whose scores are pending stays: it may be the best.
    """
    folders = {step: CheckpointFolder.of_step(url, step) for step in complete}
    metrics = {step: best_metric(folder, settings) for step, folder in folders.items()}
    values = {step: found[0] if found is not None else None for step, found in metrics.items()}
    evaluations = {step: found[1] for step, found in metrics.items() if found is not None}
    found = superfluous_steps(values, newest, settings, evaluations)
    return {step for step in found if step > newest or not is_pending(folders[step].url)}


def best_metric(folder: CheckpointFolder, settings: CheckpointSettings) -> tuple[float, str] | None:
    """Return the score that `keep_best` compares, and a digest of how it was measured.

    None if that step was not evaluated, or `state.json` is damaged.
    """
    if not settings.keep_best:
        return None
    try:
        state = folder.read_state().state
    except UserError:
        return None
    own, suite = evaluation_of(folder.url), suite_scores_of(folder.url)
    value = {**state.evaluation, **own.metrics, **suite.metrics}.get(settings.best_metric)
    facts = {**state.evaluated_as, **own.facts, **suite.facts}
    return None if value is None else (value, digest_for(settings.best_metric, facts))
