"""The global batches of a run, from where it stands to its end, through all stages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from trainer.checkpoint.format import TrainState
from trainer.config.batch_arithmetic import batch_arithmetic
from trainer.config.schedule import masking_rate
from trainer.data.loader import GlobalBatch, Loader, Position
from trainer.data.sample_range import SampleRange
from trainer.data.skipped_samples import without_skipped
from trainer.loop.run import Run


def samples_of(batch: GlobalBatch) -> SampleRange:
    """The global samples of a step."""
    position = batch.position
    return SampleRange(stage=position.stage, epoch=position.epoch, first=batch.first_sample, stop=batch.last_sample + 1)


class GlobalBatches:
    """Iterates over the global batches from a state to the run's end; their loader is that of the current stage."""

    def __init__(self, run: Run, state: TrainState) -> None:
        self._run, self._skipped = run, state.skipped_samples
        self._loader: Loader | None = None
        self._batches = self._of_stages(state.step, Position(state.stage, state.epoch, state.next_sample))

    def __iter__(self) -> Iterator[GlobalBatch]:
        return self._batches

    def __next__(self) -> GlobalBatch:
        return next(self._batches)

    def epoch_of(self, state: TrainState) -> float:
        """The epoch with its fraction; of a mixture, whose components have epochs of their own, its number alone."""
        num_samples = self._loader.num_samples(state.epoch) if self._loader is not None else None
        return state.epoch + (state.next_sample / num_samples if num_samples else 0.0)

    def _of_stages(self, step: int, position: Position) -> Iterator[GlobalBatch]:
        run, config, stage_end = self._run, self._run.config, 0
        for number, stage in enumerate(config.stages):
            stage_end += stage.steps
            if step >= stage_end:
                continue
            if position.stage != number:
                position = Position(number, position.epoch + 1, 0)
                arithmetic = batch_arithmetic(stage, run.ranks.world_size)
                run.say(f"stage {number}: {arithmetic}; a new epoch begins")
            self._loader = Loader(
                run.shard_sets,
                config.data,
                stage,
                position,
                config.training.seed,
                run.ranks.rank,
                run.ranks.world_size,
                lambda step: masking_rate(step, config.max_steps, config.data),
                step,
                pin_memory=run.ranks.device.type == "cuda",
                stage_start=stage_end - stage.steps,
            )
            described = -1
            for batch in itertools.islice(self._loader, stage_end - step):
                if batch.position.epoch != described:
                    self._describe_pairs(batch.position.epoch)
                    described = batch.position.epoch
                if batch.skipped_samples:
                    last = batch.position.epoch - 1
                    run.say(f"dropped the last {batch.skipped_samples} samples of epoch {last} (incomplete batch)")
                position = batch.next_position
                yield without_skipped(batch, self._skipped)
            step = stage_end

    def _describe_pairs(self, epoch: int) -> None:
        """Print what became of the sentences of an epoch, in a run with sentence pairs."""
        assert self._loader is not None, "asked for while batches are read"
        counts = self._loader.pair_counts(epoch) if self._run.ranks.is_first else None
        if counts is not None:
            self._run.say(f"epoch {epoch}: {counts}")
