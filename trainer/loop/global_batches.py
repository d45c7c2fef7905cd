"""The global batches of a run, from where it stands to its end, through all stages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from trainer.config.batch_arithmetic import batch_arithmetic
from trainer.config.schedule import masking_rate
from trainer.data.loader import GlobalBatch, Loader, Position
from trainer.data.sample_range import SampleRange
from trainer.data.skipped_samples import without_skipped
from trainer.loop.setup import Run


def samples_of(batch: GlobalBatch) -> SampleRange:
    """The global samples of a step."""
    position = batch.position
    return SampleRange(stage=position.stage, epoch=position.epoch, first=batch.first_sample, stop=batch.last_sample + 1)


def global_batches(run: Run) -> Iterator[GlobalBatch]:
    """The global batches from the run's state to its end, through all stages; sets `run.loader`."""
    config, stage_end = run.config, 0
    for number, stage in enumerate(config.stages):
        stage_end += stage.steps
        if run.state.step >= stage_end:
            continue
        arithmetic = batch_arithmetic(stage, run.ranks.world_size)
        position = Position(run.state.stage, run.state.epoch, run.state.next_sample)
        if position.stage != number:
            position = Position(number, position.epoch + 1, 0)
            run.say(f"stage {number}: {arithmetic}; a new epoch begins")
        run.loader = Loader(
            run.shard_sets,
            config.data,
            stage,
            position,
            config.training.seed,
            run.ranks.rank,
            run.ranks.world_size,
            lambda step: masking_rate(step, config.max_steps, config.data),
            run.state.step,
            pin_memory=run.ranks.device.type == "cuda",
            stage_start=stage_end - stage.steps,
        )
        epoch = -1
        for batch in itertools.islice(run.loader, stage_end - run.state.step):
            if batch.position.epoch != epoch:
                epoch = batch.position.epoch
                describe_pairs(run, epoch)
            if batch.skipped_samples:
                run.say(f"epoch {batch.position.epoch}: {batch.skipped_samples} rows before it were less than a batch")
            yield without_skipped(batch, run.state.skipped_samples)


def describe_pairs(run: Run, epoch: int) -> None:
    """Say what became of the sentences of an epoch, in a run with sentence pairs."""
    assert run.loader is not None, "asked for while batches are read"
    counts = run.loader.pair_counts(epoch) if run.ranks.is_first else None
    if counts is not None:
        run.say(f"epoch {epoch}: {counts}")
