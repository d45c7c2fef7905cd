"""The parts of a run, which are frozen after set-up; what changes is in `TrainState` and `Progress`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.config.run_config import RunConfig
from trainer.config.stages import Stage
from trainer.data.hidden_words import HiddenWords
from trainer.data.pair_counts import KeptPairCounts
from trainer.data.shard_set import ShardSet, has_valid_split
from trainer.distributed.process_group import Ranks
from trainer.distributed.stop_signal import StopSignal
from trainer.distributed.watchdog import Watchdog
from trainer.engine.engine import Engine
from trainer.loop.checkpoints import Checkpoints
from trainer.loop.reporter import Reporter
from trainer.objectives.objective import StageObjectives
from trainer.objectives.pretraining import PretrainingModel
from trainer.validation.facts import facts_of_run
from trainer.validation.minimal_pairs import MinimalPairs


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
