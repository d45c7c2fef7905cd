"""Loader: global batches in their fixed order, sliced for this rank, built in worker processes.

The order of samples and their masks are pure functions of the data, the seed and the epoch; ranks, workers and
micro-batches only slice it. So the entire state of a loader is a `Position`, and a loader that starts at one yields
exactly what an uninterrupted loader yields.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from data_prep.base.errors import UserError
from data_prep.base.urls import is_remote
from trainer.config.batch_arithmetic import BatchArithmetic, batch_arithmetic
from trainer.config.schedule import global_batch_tokens
from trainer.config.stages import Stage
from trainer.data.assembly import MicroBatches
from trainer.data.batch import Batch
from trainer.data.pair_counts import KeptPairCounts
from trainer.data.pair_rows import PairCounts
from trainer.data.sample_range import SampleRange
from trainer.data.samples import check_enough_rows, training_samples
from trainer.data.shard_set import ShardSet
from trainer.data.workers import next_or_stop, start_reading


@dataclass(frozen=True)
class Position:
    """Position of a run in its samples, which is the entire state of a loader."""

    stage: int
    epoch: int
    next_sample: int
    first_epoch: int = 0
    """As in `SampleRange`."""


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of one optimizer step, and this rank's part of them."""

    samples: SampleRange
    skipped_samples: int
    """Number of samples dropped at the end of the previous epoch, because they were fewer than a global batch."""
    mlm_probability: float
    arithmetic: BatchArithmetic
    """Division over ranks and micro-batches."""
    first_slice: int
    """Index of this rank's first micro-batch among those of all ranks."""
    micro_batches: tuple[Batch, ...] = ()
    """Micro-batches of this rank; none where no token is read (`Loader.planned`)."""

    @property
    def position(self) -> Position:
        """Position of the first sample; after the end of an epoch, in the next epoch."""
        samples = self.samples
        return Position(samples.stage, samples.epoch, samples.first, samples.first_epoch)

    @property
    def next_position(self) -> Position:
        return replace(self.position, next_sample=self.samples.stop)

    @property
    def first_sample(self) -> int:
        return self.samples.first

    @property
    def last_sample(self) -> int:
        """Last sample of the batch."""
        return self.samples.stop - 1

    def slices(self) -> Iterator[SampleRange]:
        """Yield the samples of each micro-batch of this rank."""
        for number in range(self.first_slice, self.first_slice + self.arithmetic.accumulation_steps):
            first, stop = (self.samples.first + row for row in self.arithmetic.slice_of(number))
            yield self.samples.model_copy(update={"first": first, "stop": stop})


class Loader:
    """Endless iterator over global batches from a position on; all ranks get the same number."""

    def __init__(
        self,
        shard_sets: Sequence[ShardSet],
        stage: Stage,
        position: Position,
        seed: int,
        ranks: tuple[int, int] = (0, 1),
        step: int = 0,
        *,
        pin_memory: bool = False,
        should_stop: Callable[[], bool] | None = None,
        pair_counts: KeptPairCounts | None = None,
    ) -> None:
        """Plan the epoch of `position`.

        Args:
            shard_sets: all data sets of the run (`RunConfig.data_sets`).
            ranks: this rank and the world size.
            step: optimizer steps of the run completed at `position`.
            should_stop: ends the wait for a store with `ReadingStopped`.
            pair_counts: counts of sentence pairs that are known; others are counted here.

        Raises:
            UserError: the data set is empty or smaller than one global batch.
        """
        own = stage.select(shard_sets)
        self._stage = stage
        self._rank, self._world_size = ranks
        self._position = position
        self._step = step
        self._pin_memory = pin_memory
        self._should_stop = should_stop if any(is_remote(each.url) for each in own) else None
        self._samples = training_samples(shard_sets, stage, seed, pair_counts)
        num_rows = batch_arithmetic(stage, self._world_size).micro_batch_rows
        self._dataset = MicroBatches(self._samples, stage.data, own[0], num_rows)
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
        workers = self._stage.data.num_workers
        # A whole global batch is prefetched, since a step begins with the counts of all its micro-batches.
        prefetch = -(-self.accumulation_steps // max(workers, 1)) + 1
        packed_batches = start_reading(self._dataset, self._slices(), workers, prefetch, pin_memory=self._pin_memory)
        for planned in self.planned():
            micro_batches = []
            for _ in range(planned.arithmetic.accumulation_steps):
                packed = next_or_stop(packed_batches, self._should_stop)
                if isinstance(packed, UserError):
                    raise packed
                micro_batches.append(Batch.unpack(packed))
            yield replace(planned, micro_batches=tuple(micro_batches))

    def planned(self) -> Iterator[GlobalBatch]:
        """Yield the global batches from the position on, without end and without reading tokens."""
        stage, epoch, first = self._stage, self._position.epoch, self._position.next_sample
        for step in itertools.count(self._step):
            tokens = global_batch_tokens(step - stage.first_step, stage)
            arithmetic = batch_arithmetic(stage, self._world_size, tokens)
            num_samples, skipped = self.num_samples(epoch), 0
            if num_samples is not None and first + arithmetic.global_rows > num_samples:
                skipped = max(0, num_samples - first)
                epoch, first = epoch + 1, 0
                check_enough_rows(self.num_samples(epoch), stage)
            stop = first + arithmetic.global_rows
            place = {"stage": self._position.stage, "epoch": epoch, "first_epoch": self._position.first_epoch}
            samples = SampleRange(**place, first=first, stop=stop)
            first_slice = self._rank * arithmetic.accumulation_steps
            yield GlobalBatch(samples, skipped, stage.masking_rate(step), arithmetic, first_slice)
            first = stop

    def _slices(self) -> Iterator[tuple[SampleRange, float]]:
        """Yield the samples and the masking rate of each micro-batch of this rank, in order, without end."""
        for planned in self.planned():
            for samples in planned.slices():
                yield samples, planned.mlm_probability
