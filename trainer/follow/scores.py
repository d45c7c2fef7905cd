"""Scores of suites on their way from `jobs.jsonl` to the MLflow run, the history and the status of a run.

The history says which scores were attached, so that none is attached twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from trainer.config.run_config import RunConfig
from trainer.follow.jobs import Scoring
from trainer.follow.notes import Note, Notes
from trainer.tracking.journal import read_record
from trainer.tracking.status import Scored, Started, add_metrics, append_history, read_history
from trainer.tracking.tracker import MetricLog, NullTracker, Tracker


def unattached(output_dir: Path, notes: Notes) -> list[Note]:
    """Return the notes whose scores are not in the history, in the order of their steps.

    A start from an earlier step is a branch, or repeats later steps, whose scores are attached again: an MLflow run
    keeps the first value of a step.
    """
    attached: dict[int, set[str]] = {}
    for event in read_history(output_dir):
        if isinstance(event, Started):
            attached = {step: names for step, names in attached.items() if step <= event.step}
        elif isinstance(event, Scored):
            attached.setdefault(event.step, set()).update(event.metrics)
    scored = [note for note in notes.values() if note.job == Scoring.name and note.state == "done"]
    missing = [note for note in scored if not note.result["metrics"].keys() <= attached.get(note.step, set())]
    return sorted(missing, key=lambda note: note.step)


def attach(note: Note, output_dir: Path, log_to: MetricLog, warn: Callable[[str], None]) -> dict[str, float]:
    """Log the scores of a note at the step of its checkpoint, and return them."""
    metrics: dict[str, float] = dict(note.result["metrics"])
    log_to.log(note.step, metrics)
    try:
        append_history(output_dir, "scored", {"step": note.step, "metrics": metrics})
    except OSError as error:
        warn(f"{output_dir} cannot be written ({error.strerror}); scores of step {note.step:,} may be attached twice")
    return metrics


@contextlib.contextmanager
def reopened_run(config: RunConfig, warn: Callable[[str], None]) -> Iterator[MetricLog]:
    """Open the MLflow run of a run that has ended, and close it again as it was.

    The caller holds the lock of the output directory: one process at a time writes these metrics.
    """
    output_dir = Path(config.output_dir)
    record = read_record(output_dir / "tracking")
    if record is None:
        warn(f"{output_dir}/tracking has no MLflow run; the scores are in its checkpoints and history")
        yield NullTracker()
        return
    tracker = Tracker.open(config.tracking, output_dir, warn, choice="")
    try:
        yield tracker
    finally:
        tracker.close(
            "FINISHED" if record.status == "FINISHED" else "FAILED" if record.status == "FAILED" else "KILLED"
        )


def add_to_status(output_dir: Path, metrics: dict[str, float], warn: Callable[[str], None]) -> None:
    """Add the newest scores to the status of a run that has ended."""
    try:
        add_metrics(output_dir, metrics)
    except OSError as error:
        warn(f"{output_dir} cannot be written ({error.strerror}); its status lacks the newest scores")
