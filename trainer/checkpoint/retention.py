"""Retention: which checkpoints a newer one makes superfluous, by one rule for the disk and the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from data_prep.base.errors import UserError
from trainer.checkpoint.format import CheckpointFolder
from trainer.checkpoint.late_scores import evaluation_of, is_pending, suite_scores_of
from trainer.config.comparability import digest_for
from trainer.config.run_settings import CheckpointSettings


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

    Raises:
        UserError: the store cannot be read.
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

    Raises:
        UserError: the store cannot be read.
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
