"""A run: its parts, which are frozen after set-up, and its progress, which functions return."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from data_prep.base.logs import logger
from trainer.checkpoint.format import DataIdentity
from trainer.checkpoint.upload import Uploader
from trainer.config.run_config import RunConfig
from trainer.config.stages import Stage
from trainer.data.hidden_words import HiddenWords
from trainer.data.pair_counts import KeptPairCounts
from trainer.data.shard_set import ShardSet, has_valid_split
from trainer.distributed.process_group import Ranks
from trainer.distributed.stop_signal import StopSignal
from trainer.distributed.watchdog import Watchdog
from trainer.engine.engine import Engine
from trainer.loop.console import StepBar
from trainer.loop.extensions import Follower
from trainer.loop.recorder import Recorder
from trainer.metrics.custom_metrics import CustomMetrics
from trainer.metrics.health import Health, NonFiniteSteps
from trainer.objectives.objective import Objective, StageObjectives
from trainer.objectives.pretraining import PretrainingModel
from trainer.tracking.status import RunStatus
from trainer.tracking.system_metrics import SystemMetrics
from trainer.tracking.tracker import MetricLog
from trainer.validation.facts import facts_of_run
from trainer.validation.minimal_pairs import MinimalPairs

LOG = logger(__name__)


@dataclass(frozen=True)
class Progress:
    """The changing state of a run that is not part of the training state in a checkpoint (`TrainState`)."""

    nonfinite: NonFiniteSteps
    saved_at: float = field(default_factory=time.monotonic)
    """Clock reading at this process's last checkpoint, or at its start."""
    logged_at: float = field(default_factory=time.monotonic)
    """Clock reading at this process's last log line of a step, or at its start."""
    saved_step: int | None = None
    """Step of the checkpoint from which the same command resumes."""
    save_is_deferred: bool = False
    """Whether a checkpoint was due at a non-finite step and has not been saved since."""
    failed_saves: int = 0
    """Failed saves of this process."""
    evaluation_is_due: bool = False
    """Whether the last step is still to be evaluated: after its checkpoint, or by the next start after a stop."""
    average_is_due: bool = False
    """As `evaluation_is_due`, of the mean of the newest checkpoints."""
    averaged_step: int | None = None
    """Step of the newest checkpoint in the mean that was evaluated last (`checkpoint.average_last`)."""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """The newest value of each metric."""
    seconds_per_step: float | None = None
    flops_per_device: float | None = None
    """FLOP/s of each device between the last two log lines."""
    seconds_left: float | None = None

    @property
    def is_scored_later(self) -> bool:
        """Whether scores of the last step are still to come from this run's own evaluation."""
        return self.evaluation_is_due or self.average_is_due


@dataclass(frozen=True)
class Run:
    """The parts of a run. The loop reports to `recorder`, `tracker`, `status`, `health` and `bar`."""

    config: RunConfig
    ranks: Ranks
    shard_sets: list[ShardSet]
    engine: Engine
    tracker: MetricLog
    recorder: Recorder
    stop_signal: StopSignal
    watchdog: Watchdog
    health: Health
    pair_counts: KeptPairCounts
    minimal_pairs: MinimalPairs | None = None
    hidden_words: HiddenWords | None = None
    custom_metrics: CustomMetrics | None = None
    uploader: Uploader | None = None
    follower: Follower | None = None
    """On rank 0."""
    status: RunStatus | None = None
    """On rank 0."""
    system: SystemMetrics | None = None
    """On rank 0, of its host."""
    bar: StepBar = field(default_factory=lambda: StepBar(False, 0, 0))
    started_at: float = field(default_factory=time.time)
    num_parameters: int = 0
    sources: Mapping[str, str] = field(default_factory=dict)
    """sha256 of every source file that runs, by name; the same on all ranks."""

    @property
    def output_dir(self) -> Path:
        return Path(self.config.output_dir)

    @property
    def data(self) -> DataIdentity:
        return data_identity(self.shard_sets)

    @property
    def evaluates(self) -> bool:
        """Whether there is anything to evaluate: a valid split or minimal pairs."""
        return self.minimal_pairs is not None or has_valid_split(self.shard_sets)

    @property
    def model(self) -> PretrainingModel:
        """The model in the engine; at ZeRO stage 3 its parameters are partitioned."""
        assert isinstance(self.engine.module, PretrainingModel)
        return self.engine.module

    def objectives_of(self, stage: Stage) -> StageObjectives:
        """Return what a stage trains."""
        return StageObjectives(self.model.objectives, {each.name: each.weight for each in stage.objectives})

    @property
    def labels(self) -> dict[str, str]:
        """The objectives in log lines, by what they are called in names of metrics."""
        return labels_of(self.model.objectives)

    def facts_of(self, step: int) -> dict[str, str]:
        """Return how an evaluation after this step measures (`trainer/config/comparability.py`)."""
        return facts_of_run(self.config.stage_of(step), self.shard_sets, self.hidden_words, self.minimal_pairs)

    def log(self, text: str) -> None:
        """Log a line on rank 0."""
        if self.ranks.is_first:
            LOG.info(text)

    def warn(self, text: str) -> None:
        """Log a warning on rank 0."""
        if self.ranks.is_first:
            LOG.warning(text)


def labels_of(objectives: Mapping[str, Objective]) -> dict[str, str]:
    """Return how log lines call the objectives, by what they are called in names of metrics."""
    return {each.metric: each.label or each.metric for each in objectives.values()}


def warn_of_disk(output_dir: Path, error: OSError) -> None:
    """Warn that the output directory cannot be written."""
    LOG.warning(f"{output_dir} cannot be written ({error.strerror}); training continues")


def data_identity(shard_sets: list[ShardSet]) -> DataIdentity:
    """Return the identity of the run's data."""
    return DataIdentity(
        manifest_digests=tuple(shard_set.manifest.digest for shard_set in shard_sets),
        tokenizer_fingerprint=shard_sets[0].manifest.tokenizer.fingerprint,
    )
