"""Where a run starts: from initial weights, at its newest checkpoint, or as a branch (`trainer/loop/branch.py`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainer.checkpoint.compatibility import check_branch, check_compatible
from trainer.checkpoint.format import Checkpoint, DataIdentity, TrainState
from trainer.checkpoint.late_scores import EVALUATION_NAME, LateScores, read_late_scores
from trainer.checkpoint.restore import find_latest, open_verified
from trainer.config.run_config import RunConfig, without_registry
from trainer.config.schedule import rate_jump_warning
from trainer.data.sample_range import Branch
from trainer.distributed.process_group import Ranks, broadcast_object
from trainer.loop.branch import begun, begun_from_other_run, is_on
from trainer.model.numerics import describe_numerics
from trainer.model.sizes import Precision


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


def first_state(start: Start, config: RunConfig, data: DataIdentity, data_lineage: tuple[str, ...]) -> TrainState:
    """Return the training state at the start; `data_lineage` are the digests of all data that the weights see.

    The first checkpoint of a branch keeps the scores of the checkpoint that it repeats.

    Raises:
        UsageError: a range of `--skip-samples` lies before the next sample.
    """
    state = start.checkpoint.saved.state if start.checkpoint is not None else TrainState()
    late = start.scores or LateScores(state="done")
    valid = {name: value for name, value in late.metrics.items() if name.startswith("valid/")}
    evaluation, facts = {**state.evaluation, **valid}, {**state.evaluated_as, **late.facts}
    changes = {"data_lineage": data_lineage, "evaluation": evaluation, "evaluated_as": facts}
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
