"""The loader: global batches in their one order, cut for this rank, built in worker processes.

The order of samples and their masks are pure functions of the data, the seed and the epoch; ranks, workers and
micro-batches only cut it into slices. So the whole state of a loader is a `Position`, and a loader that starts at
one gives exactly what it would have given had it never stopped.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch.utils.data import DataLoader

from data_prep import storage
from data_prep.errors import UserError
from data_prep.tokenizer import Tokenizer
from trainer.batch_arithmetic import batch_arithmetic
from trainer.data.batch import Batch
from trainer.data.masking import Masking
from trainer.data.micro_batches import MicroBatches, Slice
from trainer.data.passes import RowSettings, row_shape
from trainer.data.randomness import Purpose
from trainer.data.samples import SampleSpace
from trainer.data.sentence_pairs import PairCounts
from trainer.data.shard_set import Shard, ShardSet, Split
from trainer.data.words import piece_kinds
from trainer.data.workers import obey_rank_alone
from trainer.settings.data import DataSettings
from trainer.settings.training import Phase

_PREFETCHED_MICRO_BATCHES = 4


@dataclass(frozen=True)
class Position:
    """Where training stands: the whole state of a loader."""

    phase: int
    epoch: int
    next_sample: int


@dataclass(frozen=True)
class GlobalBatch:
    """This rank's part of the samples of one optimizer step."""

    position: Position
    """Where the batch begins; after the end of an epoch that is the next epoch's first sample."""
    next_position: Position
    """Where to go on after it."""
    micro_batches: tuple[Batch, ...]
    first_slice: int
    """Number of the first micro-batch among those of all ranks."""
    skipped_samples: int
    """Samples at the end of the epoch before, too few for a global batch, that were left out before this one."""

    @property
    def first_sample(self) -> int:
        return self.position.next_sample

    @property
    def last_sample(self) -> int:
        """The last sample, inclusive."""
        return self.next_position.next_sample - 1


@dataclass(frozen=True)
class _Stretch:
    """The samples of one global batch."""

    position: Position
    next_position: Position
    skipped_samples: int
    mlm_probability: float


class Loader:
    """Iterates global batches without end, exactly from a position on; every rank gets the same number."""

    def __init__(
        self,
        shard_sets: Sequence[ShardSet],
        data: DataSettings,
        phase: Phase,
        position: Position,
        seed: int,
        rank: int,
        world_size: int,
        mlm_probability: Callable[[int], float],
        step: int,
        pin_memory: bool = False,
    ) -> None:
        """Plan the epoch that `position` stands in.

        Args:
            shard_sets: the opened `data.components`, in their order.
            phase: gives row length and batch sizes; `position.phase` is only passed on.
            mlm_probability: share of tokens to predict after so many completed steps, at most
                `data.max_mlm_probability`.
            step: optimizer steps completed at `position`.

        Raises:
            UserError: the data set is empty or smaller than one global batch.
        """
        self._arithmetic = batch_arithmetic(phase, world_size)
        self._position = position
        self._mlm_probability = mlm_probability
        self._step = step
        self._first_slice = rank * self._arithmetic.accumulation_steps
        self._num_workers = data.num_workers
        self._pin_memory = pin_memory
        components = [_shards_of(shard_set, "train") for shard_set in shard_sets]
        settings = _row_settings(data, phase)
        self._samples = SampleSpace(components, _weights(data, shard_sets), settings, seed, Purpose.TRAINING)
        self._dataset = MicroBatches(
            self._samples,
            row_shape([shard for shards in components for shard in shards], settings),
            _masking(data, shard_sets[0]),
            self._arithmetic.micro_batch_rows,
            seed,
            Purpose.TRAINING,
            skip_corrupt_shards=data.on_corrupt_shard == "skip",
        )
        self._check_size(position.epoch)

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches of each rank in a global batch."""
        return self._arithmetic.accumulation_steps

    def num_samples(self, epoch: int) -> int | None:
        """Rows of an epoch; None for a mixture, whose epochs do not end."""
        return self._samples.num_samples(epoch)

    def pair_counts(self, epoch: int) -> PairCounts | None:
        """What became of the sentences of an epoch (of a mixture: of the first component's first pass), with pairs."""
        return self._samples.open_pass(epoch).pair_counts

    def __iter__(self) -> Iterator[GlobalBatch]:
        packed_batches = iter(self._data_loader())
        for stretch in self._stretches():
            micro_batches = []
            for _ in range(self.accumulation_steps):
                packed = next(packed_batches)
                if isinstance(packed, UserError):
                    raise packed
                micro_batches.append(Batch.unpack(packed))
            yield GlobalBatch(
                position=stretch.position,
                next_position=stretch.next_position,
                micro_batches=tuple(micro_batches),
                first_slice=self._first_slice,
                skipped_samples=stretch.skipped_samples,
            )

    def _data_loader(self) -> DataLoader:
        workers = self._num_workers
        return DataLoader(
            self._dataset,
            batch_size=None,
            sampler=_Slices(self),
            num_workers=workers,
            prefetch_factor=_PREFETCHED_MICRO_BATCHES if workers else None,
            # A forked worker starts at once and has the plans already. It uses neither CUDA nor torch's threads
            # (DataLoader sets one thread), which would not survive the fork.
            multiprocessing_context="fork" if workers else None,
            worker_init_fn=obey_rank_alone,
            collate_fn=_as_it_is,
            pin_memory=self._pin_memory,
            # Starting a DataLoader draws a seed: from here, so that the run's own random state stays as it is.
            generator=torch.Generator(),
        )

    def _stretches(self) -> Iterator[_Stretch]:
        """The global batches from the position on, without end."""
        position, global_rows = self._position, self._arithmetic.global_rows
        for step in itertools.count(self._step):
            num_samples = self.num_samples(position.epoch)
            skipped = 0
            if num_samples is not None and position.next_sample + global_rows > num_samples:
                skipped = max(0, num_samples - position.next_sample)
                position = Position(position.phase, position.epoch + 1, 0)
                self._check_size(position.epoch)
            following = replace(position, next_sample=position.next_sample + global_rows)
            yield _Stretch(position, following, skipped, self._mlm_probability(step))
            position = following

    def slices(self) -> Iterator[Slice]:
        """The micro-batches of this rank, in order, without end."""
        arithmetic = self._arithmetic
        num_slices = arithmetic.world_size * arithmetic.accumulation_steps
        bounds = [number * arithmetic.global_rows // num_slices for number in range(num_slices + 1)]
        own = range(self._first_slice, self._first_slice + arithmetic.accumulation_steps)
        for stretch in self._stretches():
            first = stretch.position.next_sample
            for number in own:
                yield Slice(
                    stretch.position.epoch,
                    first + bounds[number],
                    first + bounds[number + 1],
                    stretch.mlm_probability,
                )

    def _check_size(self, epoch: int) -> None:
        num_samples, arithmetic = self.num_samples(epoch), self._arithmetic
        if num_samples is not None and num_samples < arithmetic.global_rows:
            length = arithmetic.sequence_length
            raise UserError(
                f"data.shards holds {num_samples} rows of {length} places, fewer than the {arithmetic.global_rows} of "
                f"one global batch (training.global_batch_tokens={arithmetic.global_rows * length}); lower it to "
                f"{num_samples * length} or less, or prepare more text"
            )


def evaluation_batches(
    shard_sets: Sequence[ShardSet],
    data: DataSettings,
    phase: Phase,
    seed: int,
    rank: int,
    world_size: int,
    max_tokens: int | None,
) -> Iterator[Batch]:
    """The valid split once (or `max_tokens` places of it), the same rows and masks at every call and on any number of
    ranks; every rank gets the same number of batches, the last ones filled up with dead rows.

    Raises:
        UserError: the valid split is empty (of a mixture: of every component).
    """
    held_out = [shard_set for shard_set in shard_sets if shard_set.shards("valid")] or shard_sets[:1]
    shards = [shard for shard_set in held_out for shard in _shards_of(shard_set, "valid")]
    settings = _row_settings(data, phase)
    samples = SampleSpace([shards], [1.0], settings, seed, Purpose.EVALUATION)
    num_rows = phase.micro_batch_tokens // phase.sequence_length
    batches = MicroBatches(
        samples,
        row_shape(shards, settings),
        _masking(data, shard_sets[0]),
        num_rows,
        seed,
        Purpose.EVALUATION,
        skip_corrupt_shards=data.on_corrupt_shard == "skip",
    )
    total = samples.open_pass(epoch=0).num_rows
    if max_tokens is not None:
        total = min(total, max(1, max_tokens // phase.sequence_length))
    rows_of_all_ranks = num_rows * world_size
    for first in range(0, total, rows_of_all_ranks):
        own = first + rank * num_rows
        yield batches.build(Slice(0, min(own, total), min(own + num_rows, total), data.evaluated_mlm_probability))


@dataclass(frozen=True)
class _Slices:
    """What `DataLoader` calls a sampler."""

    loader: Loader

    def __iter__(self) -> Iterator[Slice]:
        return self.loader.slices()


def _row_settings(data: DataSettings, phase: Phase) -> RowSettings:
    task = None if data.sentence_pairs == "none" else data.sentence_pairs
    return RowSettings(phase.sequence_length, task, data.short_seq_probability)


def _weights(data: DataSettings, shard_sets: Sequence[ShardSet]) -> list[float]:
    """Of each component, the one given, else its tokens tempered (Conneau et al. 2019, "XLM-R", section 3.1)."""
    tokens = [shard_set.manifest.train.tokens for shard_set in shard_sets]
    return [
        component.weight if component.weight is not None else count**data.sampling_alpha
        for component, count in zip(data.components, tokens, strict=True)
    ]


def _masking(data: DataSettings, shard_set: ShardSet) -> Masking:
    kinds = None if data.mask_unit == "token" else piece_kinds(Tokenizer.load(shard_set.tokenizer_folder).pieces)
    return Masking(
        data.max_mlm_probability,
        data.mask_share,
        data.random_share,
        shard_set.manifest.tokenizer.vocab_size,
        data.mask_unit,
        kinds,
        data.mean_span_words,
    )


def _shards_of(shard_set: ShardSet, split: Split) -> list[Shard]:
    shards = shard_set.shards(split)
    if not shards:
        raise UserError(
            f"the shards {storage.redact(shard_set.url)} hold no document in the split '{split}'; prepare more text, "
            "or another share of valid documents"
        )
    return shards


def _as_it_is(value: torch.Tensor | UserError) -> torch.Tensor | UserError:
    return value
