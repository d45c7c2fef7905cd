"""Branches: a run that starts from an earlier checkpoint, of the same run or of another one.

`pretrain.py --resume-from STEP --skip-samples A:B`: the branch is a new MLflow run whose parent is the old one. Its
first checkpoint replaces the one it started from, and records the branch: the same command again, after a crash or a
requeue, resumes it and does not branch once more.

`pretrain.py --branch-from RUN:STEP --stage NAME`: a new run, which leaves the other one unchanged. It starts with
weights, optimizer state and data position of that checkpoint and trains one stage. The first checkpoint in its own
directory is the start; from then on it is resumed like any run.

Either way the first checkpoint has the step in `branched_at`, and its MLflow run is a child of the one it left.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from data_prep.base.errors import UsageError
from data_prep.storage import storage
from trainer.checkpoint.format import CheckpointFolder, DataIdentity, SavedState, TrainState, steps_in
from trainer.config.run_config import RunConfig, without_registry, without_secrets
from trainer.config.run_settings import TrackingSettings
from trainer.config.training_settings import BranchSettings
from trainer.data.sample_range import Branch, SampleRange
from trainer.tracking.journal import read_record
from trainer.tracking.status import BranchRecord, add_branch
from trainer.tracking.tracker import Tracker


def is_on(state: TrainState, branch: Branch) -> bool:
    """Return whether a run at `state` is on this branch already."""
    skipped = {(r.first, r.stop) for r in state.skipped_samples if branch.epoch in (None, r.shown_epoch)}
    return state.branched_at == branch.step and {*branch.skip} <= skipped


def begun(state: TrainState, branch: Branch) -> TrainState:
    """Return the first state of a branch of the same run, given the state of the checkpoint that it starts from.

    Raises:
        UsageError: a range of `--skip-samples` lies before the next sample.
    """
    now = state.epoch - state.first_epoch
    epoch = now if branch.epoch is None else branch.epoch
    for first, stop in branch.skip:
        if (epoch, stop) <= (now, state.next_sample):
            raise UsageError(
                f"--skip-samples {first}:{stop} of epoch {epoch} lies before sample {state.next_sample:,} of epoch "
                f"{now}, where step {state.step:,} ends",
                fix="resume from an earlier step",
                code="skipped-samples-are-past",
            )
    place = {"stage": state.stage, "epoch": state.first_epoch + epoch, "first_epoch": state.first_epoch}
    new = (SampleRange(**place, first=first, stop=stop) for first, stop in branch.skip)
    return state.model_copy(
        update={
            "skipped_samples": (*state.skipped_samples, *new),
            "branched_at": state.step,
            "mlflow_run_id": None,
        }
    )


def begun_from_other_run(state: TrainState, saved: SavedState, config: RunConfig, data: DataIdentity) -> TrainState:
    """Return the first state of a branch from another run.

    The branch continues at the other run's data position if both read the same samples; with other data or lengths it
    begins a new epoch.
    """
    before = RunConfig.model_validate(without_registry(saved.config))
    ended, stage = before.stage_of(saved.state.step), without_secrets(config).stages[0]
    is_same = stage.continues(ended) and (
        ended.select(saved.data.manifest_digests) == stage.select(data.manifest_digests)
    )
    epoch = saved.state.epoch + 1
    position = {} if is_same else {"epoch": epoch, "first_epoch": epoch, "next_sample": 0}
    start = {"stage": 0, "skipped_samples": (), "branched_at": saved.state.step, "mlflow_run_id": None}
    return state.model_copy(update={**start, **position})


def remove_later_steps(url: str, step: int) -> None:
    """Remove the checkpoints of later steps from remote storage: a run on an empty disk would resume from them.

    Raises:
        UserError: the storage denies it.
    """
    for later in steps_in(url)[0]:
        if later > step:
            CheckpointFolder.of_step(url, later).remove()


def list_in_other_run(branch: BranchSettings, output_dir: Path, warn: Callable[[str], None]) -> None:
    """List a branch in the directory of the run that it started from."""
    try:
        add_branch(
            Path(branch.run), BranchRecord(step=branch.step, stage=branch.stage, output_dir=str(output_dir.absolute()))
        )
    except OSError as error:
        warn(f"{branch.run} cannot be written ({error.strerror}): clozeworks status does not list this branch there")


def open_tracker(config: RunConfig, branch: Branch | None, state: TrainState, warn: Callable[[str], None]) -> Tracker:
    """Open the MLflow run of this start; `branch` begins here.

    A branch of the same run moves the journal of the old MLflow run to `tracking-N`. At each of its starts, a branch of
    another run names that run as its parent if both are in one experiment.
    """
    parent, tags, output_dir = None, dict[str, str](), Path(config.output_dir)
    if config.branch is not None:
        record = read_record(Path(config.branch.run) / "tracking")
        if record is not None and record.experiment == storage.hide_secrets(config.tracking.experiment):
            parent = record.run_uuid
        tags["clozeworks.branch.from"] = storage.redact(config.branch.run)
        tags |= {"clozeworks.branch.at_step": str(config.branch.step), "clozeworks.branch.stage": config.branch.stage}
    if branch is not None and branch.run is None:
        parent = _set_aside(config.tracking, output_dir, warn)
        skipped = ", ".join(str(range_) for range_ in state.skipped_samples) or "none"
        tags = {"clozeworks.resumed_from_step": str(state.step), "clozeworks.skipped_samples": skipped}
    tracker = Tracker.open(config.tracking, output_dir, warn, parent_uuid=parent)
    if tags:
        tracker.log_tags(tags)
    return tracker


def _set_aside(settings: TrackingSettings, output_dir: Path, warn: Callable[[str], None]) -> str:
    """Close the old MLflow run and move its journal; returns its UUID."""
    old = Tracker.open(settings, output_dir, warn)
    old.close("KILLED")
    number = 1
    while (aside := output_dir / f"tracking-{number}").exists():
        number += 1
    (output_dir / "tracking").rename(aside)
    return old.run_uuid
