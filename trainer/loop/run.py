"""A run: its extensions, and its parts, which are frozen after set-up; `TrainState` and `Progress` change.

Trained models, suites of evaluations and the registry come from packages that training does not import:
`trainer/api.py` hands them to the run. Suites and the registry work on checkpoints beside training, on rank 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trainer.config.run_config import RunConfig
from trainer.config.run_settings import EvaluationSettings
from trainer.config.stages import Stage
from trainer.data.hidden_words import HiddenWords
from trainer.data.pair_counts import KeptPairCounts
from trainer.data.shard_set import ShardSet, has_valid_split
from trainer.distributed.process_group import Ranks
from trainer.distributed.stop_signal import StopSignal
from trainer.distributed.watchdog import Watchdog
from trainer.engine.engine import Engine
from trainer.loop.checkpoints import Checkpoints, Follower, Say
from trainer.loop.reporter import Reporter
from trainer.objectives.objective import StageObjectives
from trainer.objectives.pretraining import PretrainingModel
from trainer.preflight.plan import Outside
from trainer.validation.loss import facts_of_run

if TYPE_CHECKING:
    from trainer.validation.minimal_pairs import MinimalPairs


class Extensions(Outside, Protocol):
    """What a run uses of packages that training does not import."""

    def pull_model(self, source: str, tracking_uri: str | None) -> Path:
        """Return the checked local folder of a model: a directory, an address in a registry, or a name on the Hub.

        Raises:
            UserError: there is no such model, or it has pickles or needs code of its own.
        """

    def modules_of_suite(self, settings: EvaluationSettings) -> list[str]:
        """Return the user's modules that have tasks of the suite; none without a suite."""

    def open_follower(self, config: RunConfig, warn: Say, log: Say) -> Follower | None:
        """Open what scores and registers the run's checkpoints; None if the run sets neither."""


@dataclass(frozen=True)
class RunData:
    """What a run reads to train and to evaluate."""

    shard_sets: Sequence[ShardSet]
    pair_counts: KeptPairCounts
    minimal_pairs: MinimalPairs | None = None
    hidden_words: HiddenWords | None = None

    @property
    def can_evaluate(self) -> bool:
        """Whether there is anything to evaluate: a valid split or minimal pairs."""
        return self.minimal_pairs is not None or has_valid_split(self.shard_sets)

    def facts_of(self, stage: Stage) -> dict[str, str]:
        """Return how an evaluation in this stage measures (`trainer/config/comparability.py`)."""
        return facts_of_run(stage, self.shard_sets, self.hidden_words, self.minimal_pairs)


@dataclass(frozen=True)
class Run:
    """The parts of a run."""

    config: RunConfig
    data: RunData
    engine: Engine
    reporter: Reporter
    checkpoints: Checkpoints
    stop_signal: StopSignal
    watchdog: Watchdog

    @property
    def ranks(self) -> Ranks:
        return self.engine.ranks

    @property
    def model(self) -> PretrainingModel:
        """The model in the engine; at ZeRO stage 3 its parameters are partitioned."""
        assert isinstance(self.engine.module, PretrainingModel)
        return self.engine.module

    def objectives_of(self, stage: Stage) -> StageObjectives:
        """Return what a stage trains."""
        return StageObjectives(self.model.objectives, {each.name: each.weight for each in stage.objectives})
