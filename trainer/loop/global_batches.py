"""The global batches of a run, from where it stands to its end, through all phases."""

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
    return SampleRange(phase=position.phase, epoch=position.epoch, first=batch.first_sample, stop=batch.last_sample + 1)


def global_batches(run: Run) -> Iterator[GlobalBatch]:
    """The global batches from the run's state to its end, through all phases; sets `run.loader`."""
    config, phase_end = run.config, 0
    for number, phase in enumerate(config.phases):
        phase_end += phase.steps
        if run.state.step >= phase_end:
            continue
        arithmetic = batch_arithmetic(phase, run.ranks.world_size)
        position = Position(run.state.phase, run.state.epoch, run.state.next_sample)
        if position.phase != number:
            position = Position(number, position.epoch + 1, 0)
            run.say(f"phase {number}: {arithmetic}; a new epoch begins")
        run.loader = Loader(
            run.shard_sets,
            config.data,
            phase,
            position,
            config.training.seed,
            run.ranks.rank,
            run.ranks.world_size,
            lambda step: masking_rate(step, config.max_steps, config.data),
            run.state.step,
            pin_memory=run.ranks.device.type == "cuda",
            phase_start=phase_end - phase.steps,
        )
        epoch = -1
        for batch in itertools.islice(run.loader, phase_end - run.state.step):
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
