"""Where a run starts: from initial weights, at its newest checkpoint, or as a branch from an earlier one.

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
from dataclasses import dataclass, replace
from pathlib import Path

from data_prep.base.errors import UsageError
from data_prep.storage import storage
from trainer.checkpoint.compatibility import check_branch, check_compatible
from trainer.checkpoint.format import Checkpoint, CheckpointFolder, DataIdentity, SavedState, TrainState, steps_in
from trainer.checkpoint.late_scores import EVALUATION_NAME, LateScores, read_late_scores
from trainer.checkpoint.restore import find_latest, open_verified
from trainer.config.run_config import RunConfig, without_registry, without_secrets
from trainer.config.run_settings import TrackingSettings
from trainer.config.schedule import rate_jump_warning
from trainer.config.training_settings import BranchSettings
from trainer.data.sample_range import Branch, SampleRange
from trainer.distributed.process_group import Ranks, broadcast_object
from trainer.model.numerics import describe_numerics
from trainer.model.sizes import Precision
from trainer.tracking.journal import read_record
from trainer.tracking.status import BranchRecord, add_branch
from trainer.tracking.tracker import Tracker


@dataclass(frozen=True)
class Start:
    """Where a run starts, the same on all ranks."""

    checkpoint: Checkpoint | None = None
    """The source of weights, optimizer state and data position; None for a new run."""
    branch: Branch | None = None
    """The branch that begins at the checkpoint; None if there is none, or it began earlier."""
    scores: LateScores | None = None
    """Scores of the evaluation that followed the save of the checkpoint."""

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return self.checkpoint.step if self.checkpoint is not None else 0

    @property
    def is_from_other_run(self) -> bool:
        """Whether the checkpoint is another run's, and this run has none of its own yet."""
        return self.branch is not None and self.branch.run is not None

    @property
    def own_checkpoint(self) -> Checkpoint | None:
        """The checkpoint, if it is this run's."""
        return None if self.is_from_other_run else self.checkpoint

    @property
    def is_unevaluated(self) -> bool:
        """Whether the run's own checkpoint is still to be evaluated."""
        return self.own_checkpoint is not None and self.scores is not None and self.scores.state == "pending"

    @property
    def first_trial(self) -> int:
        """Step after which set-up tries stages: one earlier where an evaluation is still to come."""
        return self.step - self.is_unevaluated

    @property
    def teachers(self) -> tuple[str, ...]:
        """sha256 of every teacher that the checkpoint learned from, in order."""
        return self.checkpoint.saved.teachers if self.checkpoint is not None else ()

    @property
    def teacher(self) -> str | None:
        """sha256 of the last teacher of the checkpoint's run, without those of its `init_from`."""
        return self.checkpoint.saved.data.teacher if self.checkpoint is not None else None

    @property
    def precision(self) -> Precision | None:
        """The precision that the checkpoint was trained in."""
        if self.checkpoint is None:
            return None
        precision: Precision = self.checkpoint.saved.config["training"]["precision"]
        return precision

    @property
    def data_lineage(self) -> tuple[str, ...]:
        """Manifest digests of all data that the checkpoint's weights saw."""
        return self.checkpoint.saved.data_lineage if self.checkpoint is not None else ()


def find_start(config: RunConfig, ranks: Ranks, branch: Branch | None) -> Start:
    """Return where the run starts; a collective. The run's own checkpoint has precedence over another run's.

    Raises:
        UserError: there is no checkpoint of the branch's step, or no undamaged one.
    """
    start, scores = _find_checkpoint(config, ranks, branch), None
    if start.checkpoint is not None and ranks.is_first:
        scores = read_late_scores(start.checkpoint.folder, EVALUATION_NAME)
    return replace(start, scores=broadcast_object(scores, ranks))


def _find_checkpoint(config: RunConfig, ranks: Ranks, branch: Branch | None) -> Start:
    remote, zero_stage = config.checkpoint.upload_to, config.zero.stage
    latest = find_latest(config.output_dir, ranks, remote=remote, zero_stage=zero_stage)
    if branch is not None and (latest is None or not is_on(latest.saved.state, branch)):
        return Start(
            find_latest(config.output_dir, ranks, remote=remote, zero_stage=zero_stage, step=branch.step), branch
        )
    if latest is None and config.branch is not None:
        other = Branch(config.branch.step, run=config.branch.run)
        return Start(open_verified(config.branch.run, other.step, ranks), other)
    return Start(latest)


def check_start(start: Start, config: RunConfig, data: DataIdentity, ranks: Ranks, allow_change: bool) -> list[str]:
    """Return the changes since the run's own checkpoint that are harmless or allowed, as lines.

    Raises:
        UserError: the run cannot start from the checkpoint.
    """
    if start.checkpoint is None:
        return []
    saved = start.checkpoint.saved
    if start.is_from_other_run:
        check_branch(saved, config, data)
        return []
    numerics = describe_numerics(config, ranks)
    return check_compatible(saved, config, data, ranks.world_size, numerics, allow_change)


def first_state(
    start: Start, config: RunConfig, data: DataIdentity, data_lineage: tuple[str, ...], teachers: tuple[str, ...]
) -> TrainState:
    """Return the training state at the start; `data_lineage` are the digests of all data that the weights see.

    `teachers` are the sha256 of those that the weights learned from before this start. The first checkpoint of a
    branch keeps the scores of the checkpoint that it repeats.

    Raises:
        UsageError: a range of `--skip-samples` lies before the next sample.
    """
    state = start.checkpoint.saved.state if start.checkpoint is not None else TrainState()
    late = start.scores or LateScores(state="done")
    valid = {name: value for name, value in late.metrics.items() if name.startswith("valid/")}
    evaluation, facts = {**state.evaluation, **valid}, {**state.evaluated_as, **late.facts}
    teachers = teachers if data.teacher in (None, *teachers[-1:]) else (*teachers, data.teacher)
    changes = {"data_lineage": data_lineage, "evaluation": evaluation, "evaluated_as": facts, "teachers": teachers}
    state = state.model_copy(update=changes)
    if start.branch is None or start.checkpoint is None:
        return state
    if start.is_from_other_run:
        return begun_from_other_run(state, start.checkpoint.saved, config, data)
    return begun(state, start.branch)


def rate_jump(start: Start, config: RunConfig, state: TrainState) -> str | None:
    """Warn if `training.max_steps` changed since the run's checkpoint so that the learning rate jumps; else None."""
    if start.own_checkpoint is None:
        return None
    before = RunConfig.model_validate(without_registry(start.own_checkpoint.saved.config))
    if before.max_steps == config.max_steps or not 0 < state.step < config.max_steps:
        return None
    stage = config.stage_of(state.step + 1)
    if stage.has_own_schedule:
        return None
    schedules = before.stage_of(min(state.step + 1, before.max_steps)).schedule, stage.schedule
    return rate_jump_warning(state.step, before.max_steps, config.max_steps, stage.peak_learning_rate, *schedules)


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
