"""The global batches of a run, from its current position to its end, through all stages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from trainer.checkpoint.format import TrainState
from trainer.config.batch_arithmetic import batch_arithmetic
from trainer.config.run_config import RunConfig
from trainer.config.schedule import masking_rate
from trainer.data.loader import GlobalBatch, Loader, Position
from trainer.data.sample_range import SampleRange
from trainer.data.shard_set import ShardSet
from trainer.data.skipped_samples import without_skipped
from trainer.loop.run import Run


def samples_of(batch: GlobalBatch) -> SampleRange:
    """Return the range of global samples of a step."""
    position = batch.position
    return SampleRange(stage=position.stage, epoch=position.epoch, first=batch.first_sample, stop=batch.last_sample + 1)


def open_stage(
    config: RunConfig,
    shard_sets: Sequence[ShardSet],
    number: int,
    position: Position,
    step: int,
    ranks: tuple[int, int],
    pin_memory: bool = False,
) -> Loader:
    """Open the loader of stage `number` at a position, which `step` completed steps of the run have reached.

    `ranks` are this rank and the world size.
    """
    return Loader(
        shard_sets,
        config.data,
        config.stages[number],
        position,
        config.training.seed,
        *ranks,
        lambda step: masking_rate(step, config.max_steps, config.data),
        step,
        pin_memory,
        stage_start=sum(stage.steps for stage in config.stages[:number]),
    )


def batches_from(
    config: RunConfig, shard_sets: Sequence[ShardSet], step: int, ranks: tuple[int, int]
) -> Iterator[GlobalBatch]:
    """Yield the global batches of a run after `step` completed steps, without a checkpoint's position."""
    start = epoch = 0
    for number, steps in enumerate(config.steps_by_stage):
        loader = open_stage(config, shard_sets, number, Position(number, epoch, 0), start, ranks)
        first = min(max(step - start, 0), steps)
        position = Position(number, epoch, 0)
        for spec in itertools.islice(loader.specs(), first):
            position = spec.next_position
        loader = open_stage(config, shard_sets, number, position, start + first, ranks)
        for batch in itertools.islice(loader, steps - first):
            position = batch.next_position
            yield batch
        start, epoch = start + steps, position.epoch + 1


class GlobalBatches:
    """Iterates over the global batches from a state to the end of the run; each stage has its own loader."""

    def __init__(self, run: Run, state: TrainState) -> None:
        self._run, self._skipped = run, state.skipped_samples
        self._loader: Loader | None = None
        self._batches = self._of_stages(state.step, Position(state.stage, state.epoch, state.next_sample))

    def __iter__(self) -> Iterator[GlobalBatch]:
        return self._batches

    def __next__(self) -> GlobalBatch:
        return next(self._batches)

    def epoch_of(self, state: TrainState) -> float:
        """Return the epoch with its fraction; for a mixture, whose components have epochs of their own, an integer."""
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
                run.log(f"stage {number}: {arithmetic}; starting a new epoch")
            pin_memory = run.ranks.device.type == "cuda"
            ranks = run.ranks.rank, run.ranks.world_size
            self._loader = open_stage(config, run.shard_sets, number, position, step, ranks, pin_memory)
            described = -1
            for batch in itertools.islice(self._loader, stage_end - step):
                if batch.position.epoch != described:
                    self._describe_pairs(batch.position.epoch)
                    described = batch.position.epoch
                if batch.skipped_samples:
                    last = batch.position.epoch - 1
                    run.log(f"dropped the last {batch.skipped_samples} samples of epoch {last} (incomplete batch)")
                position = batch.next_position
                yield without_skipped(batch, self._skipped)
            step = stage_end

    def _describe_pairs(self, epoch: int) -> None:
        """Log the counts of sentence pairs of an epoch."""
        assert self._loader is not None, "asked for while batches are read"
        counts = self._loader.pair_counts(epoch) if self._run.ranks.is_first else None
        if counts is not None:
            self._run.log(f"epoch {epoch}: {counts}")
