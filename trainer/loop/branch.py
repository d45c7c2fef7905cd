"""Branching from an earlier checkpoint, in the same output directory or in another one.

`pretrain.py --resume-from STEP --skip-samples A:B`: the branch is a new MLflow run whose parent is the old one. Its
first checkpoint replaces the one it started from, and records the branch: the same command again, after a crash or a
requeue, resumes it and does not branch once more.

`pretrain.py --branch-from RUN:STEP --stage NAME`: a run of its own, which leaves the other one as it is. It starts with
weights, optimizer state and data position of that checkpoint and trains one stage. The first checkpoint in its own
directory is the start; from then on it is resumed like any run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from data_prep.base.errors import UsageError
from data_prep.storage import storage
from trainer.checkpoint.format import DataIdentity, SavedState, TrainState
from trainer.checkpoint.store import remove_step, stored_steps
from trainer.config.run_config import RunConfig, without_registry, without_secrets
from trainer.config.run_settings import TrackingSettings
from trainer.config.training_settings import BranchSettings
from trainer.data.sample_range import Branch, SampleRange
from trainer.metrics.status import BranchRecord, add_branch
from trainer.tracking.journal import read_record
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


def begun_in(config: RunConfig, state: TrainState, saved: SavedState, data: DataIdentity) -> TrainState:
    """Return the first state of a branch from another run.

    It reads on where that run stood if its samples are the same; with other data or lengths it begins a new epoch.
    """
    before = RunConfig.model_validate(without_registry(saved.config))
    ended, stage = before.stage_of(saved.state.step), without_secrets(config).stages[0]
    is_same = stage.continues(ended) and (
        ended.select(saved.data.manifest_digests) == stage.select(data.manifest_digests)
    )
    position = {} if is_same else {"epoch": saved.state.epoch + 1, "next_sample": 0}
    begun = {"stage": 0, "skipped_samples": (), "branched_at": saved.state.step, "mlflow_run_id": None}
    return state.model_copy(update={**begun, **position})


def note_branch(branch: BranchSettings, output_dir: Path, warn: Callable[[str], None]) -> None:
    """List a branch in the directory of the run that it started from."""
    try:
        add_branch(
            Path(branch.run), BranchRecord(step=branch.step, stage=branch.stage, output_dir=str(output_dir.absolute()))
        )
    except OSError as error:
        warn(f"{branch.run} cannot be written ({error.strerror}): clozeworks status does not list this branch there")


def open_branch_tracker(config: RunConfig, branch: BranchSettings, warn: Callable[[str], None]) -> Tracker:
    """Open the MLflow run of a branch, whose parent is the run that it started from, if that is in one experiment."""
    record = read_record(Path(branch.run) / "tracking")
    is_known = record is not None and record.experiment == storage.hide_secrets(config.tracking.experiment)
    parent_uuid = record.run_uuid if record is not None and is_known else None
    tracker = Tracker.open(config.tracking, Path(config.output_dir), warn, parent_uuid=parent_uuid)
    source = {"from": storage.redact(branch.run), "at_step": str(branch.step), "stage": branch.stage}
    tracker.log_tags({f"clozeworks.branch.{name}": value for name, value in source.items()})
    return tracker


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
