"""Loader: global batches in their fixed order, sliced for this rank, built in worker processes.

The order of samples and their masks are pure functions of the data, the seed and the epoch; ranks, workers and
micro-batches only slice it. So the entire state of a loader is a `Position`, and a loader that starts at one yields
exactly what an uninterrupted loader yields.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from data_prep.base.errors import UserError
from data_prep.base.urls import is_remote
from trainer.config.batch_arithmetic import BatchArithmetic, StageShape, batch_arithmetic
from trainer.config.data_settings import DataSettings
from trainer.config.schedule import global_batch_tokens
from trainer.config.stages import Stage
from trainer.data.batch import Batch
from trainer.data.micro_batches import MicroBatches, Slice
from trainer.data.pair_counts import KeptPairCounts
from trainer.data.pair_rows import PairCounts
from trainer.data.randomness import Purpose
from trainer.data.samples import check_enough_rows, masking_of, training_samples
from trainer.data.shard_set import ShardSet
from trainer.data.workers import block_scheduler_signals, initialize_worker, next_or_stop


@dataclass(frozen=True)
class Position:
    """Position of a run in its samples: the entire state of a loader."""

    stage: int
    epoch: int
    next_sample: int


@dataclass(frozen=True)
class GlobalBatch:
    """This rank's part of the samples of one optimizer step."""

    position: Position
    """First sample of the batch; after the end of an epoch, the first sample of the next epoch."""
    next_position: Position
    """Position after it."""
    micro_batches: tuple[Batch, ...]
    first_slice: int
    """Index of the first micro-batch among those of all ranks."""
    arithmetic: BatchArithmetic
    """Division over ranks and micro-batches."""
    skipped_samples: int
    """Number of samples dropped at the end of the previous epoch, because they were fewer than a global batch."""

    @property
    def first_sample(self) -> int:
        return self.position.next_sample

    @property
    def last_sample(self) -> int:
        """Last sample, inclusive."""
        return self.next_position.next_sample - 1


@dataclass(frozen=True)
class GlobalBatchSpec:
    """The samples of one global batch."""

    position: Position
    next_position: Position
    skipped_samples: int
    mlm_probability: float
    arithmetic: BatchArithmetic


class Loader:
    """Endless iterator over global batches from a position on; all ranks get the same number."""

    def __init__(
        self,
        shard_sets: Sequence[ShardSet],
        data: DataSettings,
        stage: StageShape,
        position: Position,
        seed: int,
        rank: int,
        world_size: int,
        mlm_probability: Callable[[int], float],
        step: int,
        pin_memory: bool = False,
        stage_start: int = 0,
        should_stop: Callable[[], bool] | None = None,
        pair_counts: KeptPairCounts | None = None,
    ) -> None:
        """Plan the epoch of `position`.

        Args:
            shard_sets: the opened `data.components`, in their order.
            stage: sequence length and batch sizes; `position.stage` is only passed on.
            mlm_probability: masking rate by the number of completed steps, at most `data.max_mlm_probability`.
            step: optimizer steps of the run completed at `position`.
            stage_start: optimizer steps of the run before this stage, from which a batch-size ramp-up counts.
            should_stop: ends the wait for a store with `ReadingStopped`.
            pair_counts: counts of sentence pairs that are known; others are counted here.

        Raises:
            UserError: the data set is empty or smaller than one global batch.
        """
        self._stage = stage
        self._stage_start = stage_start
        self._rank, self._world_size = rank, world_size
        self._position = position
        self._mlm_probability = mlm_probability
        self._step = step
        self._num_workers = data.num_workers
        self._pin_memory = pin_memory
        self._should_stop = should_stop if any(is_remote(each.url) for each in shard_sets) else None
        self._samples = training_samples(shard_sets, data, stage, seed, pair_counts)
        self._dataset = MicroBatches(
            self._samples,
            masking_of(data, shard_sets[0]),
            batch_arithmetic(stage, world_size).micro_batch_rows,
            seed,
            Purpose.TRAINING,
            skip_corrupt_shards=data.on_corrupt_shard == "skip",
        )
        check_enough_rows(self.num_samples(position.epoch), stage)

    @property
    def accumulation_steps(self) -> int:
        """Number of micro-batches of each rank in a global batch of full size."""
        return batch_arithmetic(self._stage, self._world_size).accumulation_steps

    def num_samples(self, epoch: int) -> int | None:
        """Return the number of rows of an epoch; None for a mixture, whose epochs do not end."""
        return self._samples.num_samples(epoch)

    def pair_counts(self, epoch: int) -> PairCounts | None:
        """Return counts of the sentence pairs of an epoch (in a mixture: of the first component's first epoch)."""
        return self._samples.open_epoch(epoch).pair_counts

    def __iter__(self) -> Iterator[GlobalBatch]:
        with block_scheduler_signals():
            packed_batches = iter(self._data_loader())
        for spec in self.specs():
            micro_batches = []
            for _ in range(spec.arithmetic.accumulation_steps):
                packed = next_or_stop(packed_batches, self._should_stop)
                if isinstance(packed, UserError):
                    raise packed
                micro_batches.append(Batch.unpack(packed))
            yield GlobalBatch(
                position=spec.position,
                next_position=spec.next_position,
                micro_batches=tuple(micro_batches),
                first_slice=self._rank * spec.arithmetic.accumulation_steps,
                arithmetic=spec.arithmetic,
                skipped_samples=spec.skipped_samples,
            )

    def _data_loader(self) -> DataLoader[torch.Tensor | UserError]:
        workers = self._num_workers
        return DataLoader(
            self._dataset,
            batch_size=None,
            sampler=_Slices(self),
            num_workers=workers,
            # A whole global batch is prefetched, since a step begins with the counts of all its micro-batches.
            prefetch_factor=-(-self.accumulation_steps // workers) + 1 if workers else None,
            # A forked worker starts at once and inherits the plans. It uses neither CUDA nor torch's threads
            # (DataLoader sets one thread), which do not survive a fork.
            multiprocessing_context="fork" if workers else None,
            worker_init_fn=initialize_worker,
            collate_fn=_as_it_is,
            pin_memory=self._pin_memory,
            # Starting a DataLoader draws a seed: from this generator, so that the random state of the run is unchanged.
            generator=torch.Generator(),
        )

    def specs(self) -> Iterator[GlobalBatchSpec]:
        """Yield the samples of the global batches from the position on, without end and without reading tokens."""
        position = self._position
        for step in itertools.count(self._step):
            tokens = global_batch_tokens(step - self._stage_start, self._stage)
            arithmetic = batch_arithmetic(self._stage, self._world_size, tokens)
            global_rows = arithmetic.global_rows
            num_samples = self.num_samples(position.epoch)
            skipped = 0
            if num_samples is not None and position.next_sample + global_rows > num_samples:
                skipped = max(0, num_samples - position.next_sample)
                position = Position(position.stage, position.epoch + 1, 0)
                check_enough_rows(self.num_samples(position.epoch), self._stage)
            following = replace(position, next_sample=position.next_sample + global_rows)
            yield GlobalBatchSpec(position, following, skipped, self._mlm_probability(step), arithmetic)
            position = following

    def slices(self) -> Iterator[Slice]:
        """Yield the micro-batches of this rank, in order, without end."""
        for spec in self.specs():
            accumulation_steps = spec.arithmetic.accumulation_steps
            for number in range(self._rank * accumulation_steps, (self._rank + 1) * accumulation_steps):
                first, stop = (spec.position.next_sample + row for row in spec.arithmetic.slice_of(number))
                yield Slice(spec.position.epoch, first, stop, spec.mlm_probability)


def open_loader(
    shard_sets: Sequence[ShardSet],
    stage: Stage,
    position: Position,
    seed: int,
    ranks: tuple[int, int],
    step: int = 0,
    pin_memory: bool = False,
    should_stop: Callable[[], bool] | None = None,
    pair_counts: KeptPairCounts | None = None,
) -> Loader:
    """Open the loader of a stage at a position, which `step` completed steps of the run have reached.

    Args:
        shard_sets: all data sets of the run (`RunConfig.data_sets`).
        ranks: this rank and the world size.
        should_stop, pair_counts: as of `Loader`.

    Raises:
        UserError: the data set is empty or smaller than one global batch.
    """
    return Loader(
        stage.select(shard_sets),
        stage.data,
        stage,
        position,
        seed,
        *ranks,
        stage.masking_rate,
        step,
        pin_memory,
        stage_start=stage.first_step,
        should_stop=should_stop,
        pair_counts=pair_counts,
    )


@dataclass(frozen=True)
class _Slices:
    """The sampler of the `DataLoader`."""

    loader: Loader

    def __iter__(self) -> Iterator[Slice]:
        return self.loader.slices()


def _as_it_is(value: Any) -> Any:
    """Return the micro-batch: without a batch size `DataLoader` passes single items."""
    return value
