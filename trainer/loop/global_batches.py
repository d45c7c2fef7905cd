"""The global batches of a run, from its current position to its end, through all stages."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.checkpoint.format import TrainState
from trainer.config.batch_arithmetic import batch_arithmetic
from trainer.config.run_config import RunConfig
from trainer.config.stages import Stage
from trainer.data.loader import GlobalBatch, Loader, Position
from trainer.data.pair_counts import PAIR_COUNTS, KeptPairCounts
from trainer.data.pair_rows import PairCounts
from trainer.data.sample_range import SampleRange
from trainer.data.shard_set import ShardSet
from trainer.data.workers import ReadingStopped, explain_lost_workers
from trainer.distributed.process_group import Ranks
from trainer.distributed.stop_signal import StopSignal
from trainer.distributed.watchdog import Watchdog
from trainer.loop.run import Run

if TYPE_CHECKING:
    from trainer.loop.pair_counting import PairCounting


def position_of(state: TrainState) -> Position:
    """Return the position of a run in its samples."""
    return Position(state.stage, state.epoch, state.next_sample, state.first_epoch)


def first_position(config: RunConfig, number: int, position: Position) -> Position:
    """Return where stage `number` begins, after an earlier stage ended at `position`.

    A stage with the same samples continues with the unread ones; any other stage begins a new epoch, and with it the
    count of its epochs.
    """
    ended = config.stages[position.stage] if position.stage < len(config.stages) else None
    if ended is not None and config.stages[number].continues(ended):
        return replace(position, stage=number)
    return Position(number, position.epoch + 1, 0, first_epoch=position.epoch + 1)


def start_of_stage(config: RunConfig, shard_sets: Sequence[ShardSet], number: int, state: TrainState) -> Position:
    """Return where stage `number` of a run begins, or began.

    Args:
        state: the newest known state of the run. Its own stage has `first_epoch` from it; later ones are planned.
    """
    if state.stage > number:
        state = TrainState()
    position, step = position_of(state), state.step
    for earlier, stage in enumerate(config.stages[:number]):
        steps = stage.first_step + stage.taken_steps - step
        if steps > 0:
            position = first_position(config, earlier, position) if position.stage != earlier else position
            loader = Loader(shard_sets, stage, position, config.training.seed, step=step)
            position, step = _position_after(steps, loader, position), step + steps
    return first_position(config, number, position) if position.stage != number else position


def _position_after(steps: int, loader: Loader, position: Position) -> Position:
    """Return the position after so many steps of a loader that starts at `position`; no token is read."""
    for batch in itertools.islice(loader.planned(), steps):
        position = batch.next_position
    return position


def batches_from(
    config: RunConfig, shard_sets: Sequence[ShardSet], step: int, ranks: tuple[int, int]
) -> Iterator[GlobalBatch]:
    """Yield the global batches of a run after `step` completed steps, without a checkpoint's position."""
    position, seed = Position(0, 0, 0), config.training.seed
    for number, stage in enumerate(config.stages):
        position = first_position(config, number, position) if number else position
        start, steps = stage.first_step, stage.taken_steps
        first = min(max(step - start, 0), steps)
        if first:
            position = _position_after(first, Loader(shard_sets, stage, position, seed, ranks, start), position)
        if first < steps:
            loader = Loader(shard_sets, stage, position, seed, ranks, start + first)
            for batch in itertools.islice(loader, steps - first):
                position = batch.next_position
                yield batch


def count_first_epoch(
    config: RunConfig,
    shard_sets: Sequence[ShardSet],
    state: TrainState,
    ranks: Ranks,
    watchdog: Watchdog,
    stop_signal: StopSignal,
) -> KeptPairCounts:
    """Count the sentence pairs of the epoch in which `GlobalBatches` starts, on all ranks together.

    A stop ends the count; `GlobalBatches`, which needs it, then ends the run before its first step.

    Raises:
        UserError: a shard cannot be planned.
    """
    pair_counts = KeptPairCounts(Path(config.output_dir) / PAIR_COUNTS)
    position = position_of(state)
    for number, stage in enumerate(config.stages):
        if state.step < min(stage.last_step, config.max_steps):
            start = first_position(config, number, position) if position.stage != number else position
            if stage.data.has_sentence_pairs:
                from trainer.loop.pair_counting import PairCounting

                counting = PairCounting(config, stage, shard_sets, pair_counts, ranks, watchdog.mark, stop_signal)
                lost = explain_lost_workers(ranks.rank, stage.data.num_workers, watchdog.end_run)
                with contextlib.suppress(ReadingStopped), lost:
                    counting.open(start)
            break
    return pair_counts


@dataclass(frozen=True)
class FetchedBatch:
    """A global batch, which may be read while the step before it runs."""

    batch: GlobalBatch
    epoch: float | None
    """The epoch of the data with its fraction after this batch; None for a mixture, whose epochs do not end."""
    notes: tuple[str, ...]
    """Lines of the log before its step: a new stage, a new epoch."""


class GlobalBatches:
    """Iterates over the global batches from a state to the end of the run; each stage has its own loader.

    The collectives of reading a batch follow from its position alone, because all ranks read the same number ahead.
    """

    def __init__(self, run: Run, state: TrainState) -> None:
        self._run, self._skipped = run, state.skipped_samples
        self._batches = self._of_stages(state.step, position_of(state))

    def __iter__(self) -> Iterator[FetchedBatch]:
        return self._batches

    def __next__(self) -> FetchedBatch:
        return next(self._batches)

    def _of_stages(self, step: int, position: Position) -> Iterator[FetchedBatch]:
        run, config, notes = self._run, self._run.config, list[str]()
        for number, stage in enumerate(config.stages):
            stop = min(stage.last_step, config.max_steps)  # nothing is read beyond the end of the run
            if step >= stop:
                continue
            if position.stage != number:
                before, position = position, first_position(config, number, position)
                arithmetic = batch_arithmetic(stage, run.ranks.world_size)
                data = "continuing the epoch" if position.epoch == before.epoch else "starting a new epoch"
                notes.append(f"{stage.label}: {arithmetic}; {data}")
            counting = self._counting_of(stage)
            if counting is not None:
                counting.open(position)
            loader = Loader(
                run.data.shard_sets,
                stage,
                position,
                config.training.seed,
                (run.ranks.rank, run.ranks.world_size),
                step,
                pin_memory=run.ranks.device.type == "cuda",
                should_stop=lambda: self._run.stop_signal.is_requested,
                pair_counts=run.data.pair_counts,
            )
            described = -1
            for batch in itertools.islice(loader, stop - step):
                if (epoch := batch.samples.epoch) != described:
                    notes += describe_epoch(batch, loader.pair_counts(epoch) if run.ranks.is_first else None)
                    described = epoch
                position, step = batch.next_position, step + 1
                rows = loader.num_samples(epoch)
                shown = None if rows is None else batch.samples.shown_epoch + position.next_sample / rows
                yield FetchedBatch(without_skipped(batch, self._skipped), shown, tuple(notes))
                notes.clear()
                if counting is not None:
                    counting.advance(position, stop - step)

    def _counting_of(self, stage: Stage) -> PairCounting | None:
        if not stage.data.has_sentence_pairs:
            return None
        from trainer.loop.pair_counting import PairCounting

        run = self._run
        return PairCounting(
            run.config, stage, run.data.shard_sets, run.data.pair_counts, run.ranks, run.watchdog.mark, run.stop_signal
        )


def describe_epoch(first: GlobalBatch, counts: PairCounts | None) -> Iterator[str]:
    """Yield the log lines about an epoch at the first batch that is read from it."""
    epoch = first.samples.shown_epoch
    if counts is not None:
        yield f"epoch {epoch}: {counts}"
    if first.skipped_samples:
        yield f"dropped the last {first.skipped_samples:,} samples of epoch {epoch - 1} (incomplete batch)"


def without_skipped(batch: GlobalBatch, skipped: Sequence[SampleRange]) -> GlobalBatch:
    """Remove the labels in the rows of the skipped samples (`--skip-samples`) from a batch.

    The rows keep their positions in the order, so every rank still gets the same batches and a resume stays exact. A
    global batch whose rows are all skipped changes nothing (`trainer/loop/step.py`).
    """
    samples = batch.samples
    ranges = [r for r in skipped if (r.stage, r.epoch) == (samples.stage, samples.epoch)]
    if not any(r.first < samples.stop and samples.first < r.stop for r in ranges):
        return batch
    micro_batches = []
    for own, micro_batch in zip(batch.slices(), batch.micro_batches, strict=True):
        rows = [
            sample - own.first
            for sample in range(own.first, own.stop)
            if any(r.first <= sample < r.stop for r in ranges)
        ]
        micro_batches.append(micro_batch.without_predictions(rows))
    return replace(batch, micro_batches=tuple(micro_batches))
