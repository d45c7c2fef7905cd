"""Branching from an earlier checkpoint: `pretrain.py --resume-from STEP --skip-samples A:B`.

The branch is a new MLflow run whose parent is the old one. Its first checkpoint replaces the one it started from, and
records the branch: the same command again, after a crash or a requeue, resumes it and does not branch once more.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from data_prep.base.errors import UsageError
from trainer.checkpoint.format import TrainState
from trainer.checkpoint.store import remove_step, stored_steps
from trainer.config.run_settings import TrackingSettings
from trainer.data.sample_range import Branch, SampleRange
from trainer.tracking.tracker import Tracker


def is_on(state: TrainState, branch: Branch) -> bool:
    """Return whether a run at `state` is on this branch already."""
    skipped = {(r.first, r.stop) for r in state.skipped_samples if branch.epoch in (None, r.epoch)}
    return state.branched_at == branch.step and {*branch.skip} <= skipped


def branched(state: TrainState, branch: Branch) -> TrainState:
    """Return the first state of a branch, given the state of the checkpoint that it starts from.

    Raises:
        UsageError: a range of `--skip-samples` lies before the next sample.
    """
    epoch = state.epoch if branch.epoch is None else branch.epoch
    for first, stop in branch.skip:
        if (epoch, stop) <= (state.epoch, state.next_sample):
            raise UsageError(
                f"--skip-samples {first}:{stop} of epoch {epoch} lies before sample {state.next_sample:,} of epoch "
                f"{state.epoch}, where step {state.step:,} ends",
                fix="resume from an earlier step",
                code="skipped-samples-are-past",
            )
    new = (SampleRange(stage=state.stage, epoch=epoch, first=first, stop=stop) for first, stop in branch.skip)
    return state.model_copy(
        update={
            "skipped_samples": (*state.skipped_samples, *new),
            "branched_at": state.step,
            "mlflow_run_id": None,
        }
    )


def remove_later_steps(url: str, step: int) -> None:
    """Remove the checkpoints of later steps from remote storage: a run on an empty disk would resume from them.

    Raises:
        UserError: the storage denies it.
    """
    for later in stored_steps(url):
        if later > step:
            remove_step(url, later)


def begin_mlflow_run(
    settings: TrackingSettings, output_dir: Path, state: TrainState, warn: Callable[[str], None]
) -> Tracker:
    """Close the old MLflow run, move its journal to `tracking-N`, and open a new run whose parent is the old one."""
    old = Tracker.open(settings, output_dir, warn)
    old.close("KILLED")
    number = 1
    while (aside := output_dir / f"tracking-{number}").exists():
        number += 1
    (output_dir / "tracking").rename(aside)
    tracker = Tracker.open(settings, output_dir, warn, parent_uuid=old.run_uuid)
    skipped = ", ".join(str(range_) for range_ in state.skipped_samples)
    tags = {"clozeworks.resumed_from_step": str(state.step), "clozeworks.skipped_samples": skipped or "none"}
    tracker.log_tags(tags)
    return tracker
