"""Counting of the sentence pairs of an epoch before it is read: each rank plans a share of the shards.

The number of rows of every shard must be known before the first batch of an epoch. All ranks count the epoch in which
a run starts together, and in the background the next one while this one is read. The collectives follow from
the position in the samples alone. A process that needs counts that are not known yet, such as a worker that reads ahead
in a very short epoch, plans all shards itself, with the same result.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from data_prep.base.errors import UserError
from data_prep.base.logs import logger
from trainer.config.run_config import RunConfig
from trainer.config.stages import Stage
from trainer.data.loader import Position
from trainer.data.pair_counts import NUM_COUNTS, KeptPairCounts, PairPlanner
from trainer.data.samples import ReadEpoch, training_samples
from trainer.data.shard_set import ShardSet
from trainer.data.workers import ReadingStopped, initialize_worker, next_or_stop, start_reading
from trainer.distributed.agreement import raise_error_of_any
from trainer.distributed.process_group import Ranks, all_reduce_sum, broadcast_object, patient_collectives
from trainer.distributed.stop_signal import StopPoll, StopSignal

LOG = logger(__name__)

_TOKENS_IN_PLACE = 50_000_000
"""A share of at most this many tokens is counted in under a second, which is not worth a process."""
_SLOWEST_TOKENS_PER_SECOND = 2_000_000
"""A core of 2025 plans 75 million tokens per second."""
_SHORTEST_EPOCH = 64
"""The ranks count the next epoch together if the present one has at least this many global batches."""

Counted = tuple[int, Any]
"""Number of a shard, and the counts of the shard or the `UserError` of planning it."""


class PairCounting:
    """Counts the epochs that a stage reads, on all ranks together."""

    def __init__(
        self,
        config: RunConfig,
        stage: Stage,
        shard_sets: Sequence[ShardSet],
        pair_counts: KeptPairCounts,
        ranks: Ranks,
        mark: Callable[[str, int], object],
        stop_signal: StopSignal,
    ) -> None:
        """`mark` records the operation of this rank and its time limit in seconds (`Watchdog.mark`)."""
        self._stop_signal = stop_signal
        self._samples = training_samples(shard_sets, stage, config.training.seed, pair_counts)
        self._pair_counts, self._ranks, self._mark, self._settings = pair_counts, ranks, mark, config.distributed
        self._num_workers = stage.data.num_workers
        self._global_rows = stage.global_batch_tokens // stage.sequence_length
        # Each node keeps the counts where nodes have disks of their own.
        self._writes = ranks.is_first or (config.checkpoint.upload_to is not None and ranks.local_rank == 0)
        self._reading: dict[int, ReadEpoch] = {}
        """The present epoch of each component whose epochs are long enough to count the next one together."""
        self._ahead: dict[ReadEpoch, tuple[Iterable[Counted], int]] = {}
        """The epochs that are counted in the background, each with the number of rows of the present epoch that are
        left when the count must be done."""
        self._counted: set[ReadEpoch] = set()

    def open(self, position: Position) -> None:
        """Count what is needed to read from a position on.

        Raises:
            UserError: a rank cannot plan a shard of its share; on all ranks.
            ReadingStopped: a rank received a stop request before all was counted; on all ranks.
        """
        samples, reading = self._samples, dict[int, ReadEpoch]()
        for read in samples.epochs_until(position.epoch, position.next_sample):
            reading[read.component] = read
            self._count(read)
        self._reading = {
            component: read
            for component, read in reading.items()
            if samples.num_rows(read) >= self._few_rows(component)
        }

    def advance(self, position: Position, num_steps: int) -> None:
        """Begin to count the next epochs; collect the counts when half of the rest of the present epochs is read.

        Args:
            position: what all ranks read next.
            num_steps: how many steps of the stage are left.

        Raises:
            UserError, ReadingStopped: as `open`.
        """
        self._pair_counts.write_late()
        samples = self._samples
        for component, read in self._reading.items() if num_steps else ():
            while samples.is_over(read, position.epoch, position.next_sample):
                read = samples.following(read)
            self._reading[component] = read
            left, following = samples.num_rows_left(read, position.next_sample), samples.following(read)
            is_last = samples.num_rows_of(component, (num_steps + 1) * self._global_rows) <= left
            if is_last or following in self._counted:
                continue
            if following not in self._ahead and not self._find(following):
                ahead = self._begin(samples.planner(following), min(1, self._num_workers))
                self._ahead[following] = ahead, left // 2 if left >= self._few_rows(component) else left
            if following in self._ahead and left <= self._ahead[following][1]:
                self._count(following)

    def _few_rows(self, component: int) -> int:
        return self._samples.num_rows_of(component, _SHORTEST_EPOCH * self._global_rows)

    def _find(self, read: ReadEpoch) -> bool:
        """Return whether rank 0 knows the counts; then all ranks get them."""
        planner = self._samples.planner(read)
        counts = broadcast_object(self._pair_counts.find(planner) if self._ranks.is_first else None, self._ranks)
        if counts is not None:
            self._pair_counts.keep(planner, counts, writes=self._writes and not self._ranks.is_first)
            self._counted.add(read)
        return counts is not None

    def _count(self, read: ReadEpoch) -> None:
        planner, (ahead, _) = self._samples.planner(read), self._ahead.pop(read, (None, 0))
        if ahead is None:
            if self._find(read):
                return
            is_small = self._tokens_of_share(planner) <= _TOKENS_IN_PLACE
            ahead = self._begin(planner, 0 if is_small else self._num_workers)
            if not is_small and self._ranks.is_first:
                LOG.info(f"counting the sentence pairs of {len(planner.shards):,} shards, a share on each rank")
        seconds = 600 + self._tokens_of_share(planner) // _SLOWEST_TOKENS_PER_SECOND
        self._mark("counting sentence pairs", seconds)
        with patient_collectives(seconds, self._settings, self._ranks):
            counts = self._sum(planner, iter(ahead))
            if counts is not None:
                self._pair_counts.keep(planner, counts, self._writes)
        self._mark("counted sentence pairs", 0)
        if counts is None:
            raise ReadingStopped
        self._counted.add(read)

    def _sum(self, planner: PairPlanner, share: Iterator[Counted]) -> np.ndarray | None:
        """Return the counts of all ranks; None on all ranks after a stop request of any rank."""
        own = np.zeros((len(planner.shards), NUM_COUNTS), np.int64)
        problem: UserError | None = None
        poll, has_left, is_stopped = StopPoll(self._stop_signal, self._ranks), True, False
        for _ in range(-(-len(planner.shards) // self._ranks.world_size)):
            if poll():
                return None
            try:  # a rank that has no more to count stays with the others, which may get a stop request
                counted = next_or_stop(share, lambda: self._stop_signal.is_requested) if has_left else None
            except (StopIteration, ReadingStopped) as ended:
                has_left, is_stopped, counted = False, isinstance(ended, ReadingStopped), None
            if counted is not None and isinstance(counted[1], UserError):
                has_left, problem = False, counted[1]
            elif counted is not None:
                own[counted[0]] = counted[1]
        poll.conclude()
        if poll.is_agreed or is_stopped:
            return None
        raise_error_of_any(problem, self._ranks)
        return all_reduce_sum(torch.from_numpy(own), self._ranks).cpu().numpy()

    def _tokens_of_share(self, planner: PairPlanner) -> int:
        return sum(shard.record.tokens for shard in planner.shards) // self._ranks.world_size

    def _begin(self, planner: PairPlanner, num_workers: int) -> Iterable[Counted]:
        """Begin to plan this rank's share in worker processes; without them it is planned when the result is used."""
        share = range(self._ranks.rank, len(planner.shards), self._ranks.world_size)
        prefetch = -(-len(share) // max(num_workers, 1)) or 1
        return start_reading(_ShardCounts(planner), share, num_workers, prefetch, begin=_begin_worker)


@dataclass(frozen=True)
class _ShardCounts(Dataset[Counted]):
    planner: PairPlanner

    def __getitem__(self, number: int) -> Counted:
        try:
            return number, astuple(self.planner.plan(number).counts)
        except UserError as error:
            return number, error


def _begin_worker(worker: int) -> None:
    os.nice(10)  # the step and the workers that build its batches come first
    initialize_worker(worker)
