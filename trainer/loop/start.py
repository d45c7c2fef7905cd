"""Where a run starts: from initial weights, at its newest checkpoint, or as a branch of an earlier checkpoint.

`pretrain.py --resume-from STEP --skip-samples A:B`: the branch is a new MLflow run whose parent is the old one. Its
first checkpoint replaces the one it started from, and records the branch: the same command again, after a crash or a
requeue, resumes it and does not branch once more.

`pretrain.py --branch-from RUN:STEP --stage NAME`: a run of its own, which leaves the other one as it is. It starts with
weights, optimizer state and data position of that checkpoint and trains one stage. The first checkpoint in its own
directory is the start; from then on it is resumed like any run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
    """Gives weights, optimizer state and data position; None for a new run."""
    branch: Branch | None = None
    """The branch of `--resume-from` that begins at the checkpoint; None if there is none, or it began earlier."""
    is_from_other_run: bool = False
    """Whether the checkpoint is another run's (`--branch-from`), and this run has none of its own yet."""

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return self.checkpoint.step if self.checkpoint is not None else 0

    @property
    def own_checkpoint(self) -> Checkpoint | None:
        """The checkpoint, if it is this run's."""
        return None if self.is_from_other_run else self.checkpoint

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
    """Return where the run starts; a collective. A checkpoint of its own has precedence over another run's.

    Raises:
        UserError: there is no checkpoint of the branch's step, or none that is whole.
    """
    remote, zero_stage = config.checkpoint.upload_to, config.zero.stage
    latest = find_latest(config.output_dir, ranks, remote=remote, zero_stage=zero_stage)
    if branch is not None and (latest is None or not is_on(latest.saved.state, branch)):
        return Start(
            find_latest(config.output_dir, ranks, remote=remote, zero_stage=zero_stage, step=branch.step), branch
        )
    if latest is None and config.branch is not None:
        return Start(open_verified(config.branch.run, config.branch.step, ranks), is_from_other_run=True)
    return Start(latest)


def check_start(start: Start, config: RunConfig, data: DataIdentity, ranks: Ranks, allow_change: bool) -> list[str]:
    """Return what changed since the run's own checkpoint and is harmless or allowed.

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


def scores_of_start(start: Start, ranks: Ranks) -> LateScores | None:
    """Return the scores of the checkpoint that follow its save, as rank 0 reads them; a collective."""
    folder = start.checkpoint.folder if start.checkpoint is not None and ranks.is_first else None
    own = read_late_scores(folder, EVALUATION_NAME) if folder is not None else None
    scores: LateScores | None = broadcast_object(own, ranks)
    return scores


def is_unevaluated(start: Start, scores: LateScores | None) -> bool:
    """Return whether the run's own checkpoint is still to be evaluated."""
    return start.own_checkpoint is not None and scores is not None and scores.state == "pending"


def first_state(
    start: Start,
    config: RunConfig,
    data: DataIdentity,
    data_lineage: tuple[str, ...],
    scores: LateScores | None = None,
) -> TrainState:
    """Return the training state at the start; `data_lineage` are the digests of all data that the weights see.

    A first checkpoint of a branch keeps the `scores` of the checkpoint that it repeats.

    Raises:
        UsageError: a range of `--skip-samples` lies before the next sample.
    """
    state = start.checkpoint.saved.state if start.checkpoint is not None else TrainState()
    late = scores.metrics if scores is not None else {}
    evaluation = {**state.evaluation, **{name: value for name, value in late.items() if name.startswith("valid/")}}
    facts = {**state.evaluated_as, **(scores.facts if scores is not None else {})}
    changes = {"data_lineage": data_lineage, "evaluation": evaluation, "evaluated_as": facts}
    state = state.model_copy(update=changes)
    if start.branch is not None:
        state = branched(state, start.branch)
    if start.checkpoint is not None and start.is_from_other_run:
        state = branch_state(config, state, start.checkpoint.saved, data)
    return state


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
    for later in steps_in(url)[0]:
        if later > step:
            CheckpointFolder.of_step(url, later).remove()


def branch_state(config: RunConfig, state: TrainState, saved: SavedState, data: DataIdentity) -> TrainState:
    """Return the first state of a branch from another run.

    It reads on where that run stood if its samples are the same; with other data or lengths it begins a new epoch.
    """
    before = RunConfig.model_validate(without_registry(saved.config))
    ended, stage = before.stage_of(saved.state.step), without_secrets(config).stages[0]
    is_same = stage.continues(ended) and (
        ended.select(saved.data.manifest_digests) == stage.select(data.manifest_digests)
    )
    position = {} if is_same else {"epoch": saved.state.epoch + 1, "next_sample": 0}
    start = {"stage": 0, "skipped_samples": (), "branched_at": saved.state.step, "mlflow_run_id": None}
    return state.model_copy(update={**start, **position})


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
