"""Trials before the first step: memory, compilation, and the user's objectives; no weight changes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from trainer.config.batch_arithmetic import StageShape, batch_arithmetic
from trainer.config.data_settings import DataSettings
from trainer.config.measurements import evaluated_shapes, objectives_measured
from trainer.config.objective_settings import is_taught
from trainer.config.run_config import RunConfig
from trainer.config.stages import Stage
from trainer.data.batch import Batch
from trainer.data.evaluation_batches import evaluation_batches
from trainer.data.shard_set import ShardSet, Split, has_valid_split
from trainer.distributed.process_group import Ranks, patient_collectives
from trainer.distributed.watchdog import Watchdog
from trainer.engine.engine import Engine
from trainer.objectives.build import check_scores
from trainer.objectives.objective import Scores, StageObjectives
from trainer.objectives.pretraining import Output, PretrainingModel

COMPILATION_SECONDS = 3600
"""Time limit for all compilation of a set-up on a rank while the others wait; a cold cache takes minutes."""


def warmup_step(
    engine: Engine, config: RunConfig, shard_sets: list[ShardSet], ranks: Ranks, step: int, watchdog: Watchdog
) -> None:
    """Take one step that changes nothing, so that out-of-memory errors come first: at the largest micro-batch and the
    largest with a teacher.

    With compilation, the step takes every shape and compiles all graphs of training and evaluation after `step`, so the
    timeouts of steps need no allowance for a compiler.
    """
    ahead, is_compiled = stages_after(step, config), config.training.compile is True
    shapes = one_of_each_shape([_as_cut(stage, ranks.world_size) for stage in ahead])
    if not is_compiled:
        shapes = largest_of(shapes)
    batches = [first_batch(stage, stage.data, config, shard_sets, ranks) for stage in shapes]
    losses = [_loss_of(engine, stage, batch) for stage, batch in zip(shapes, batches, strict=True)]
    if not is_compiled:
        engine.warmup_step(*losses)
        return
    with patient_collectives(COMPILATION_SECONDS, config.distributed, ranks):
        watchdog.mark("compiling for training", COMPILATION_SECONDS)
        engine.warmup_step(*losses)
        watchdog.mark("compiling for evaluation", COMPILATION_SECONDS)
        engine.eval()
        with torch.no_grad():
            for metrics, data, shape in evaluated_shapes(ahead):
                batch = first_batch(shape, data, config, shard_sets, ranks)
                engine.forward(batch, scored=objectives_measured(metrics))
        engine.train()
    watchdog.mark("setting up")


def try_own_objectives(engine: Engine, config: RunConfig, shard_sets: list[ShardSet], ranks: Ranks) -> None:
    """Check on a micro-batch of each stage, and with a row of padding in it, that objectives of the user's count what
    they score; a collective.

    Raises:
        UserError: an objective fails, or its count differs from its scores, so that its mean would be wrong.
    """
    if not config.has_own_objectives:
        return
    assert isinstance(engine.module, PretrainingModel)
    engine.eval()
    for stage in config.stages:
        own = [each.name for each in stage.objectives if each.is_own]
        if not own:
            continue
        full = first_batch(stage, stage.data, config, shard_sets, ranks)
        # Few micro-batches have padding, so a count that includes it would show much later.
        padded = full.to(torch.device("cpu")).without_predictions([0]).to(ranks.device)
        for batch in (full, padded):
            with torch.no_grad():
                found: Mapping[str, Scores] = engine.forward(batch, scored=own)
            counts = StageObjectives(engine.module.objectives, dict.fromkeys(own, 1.0)).num_predictions([batch])
            for name in own:
                check_scores(name, found[name], counts[name], batch)
    engine.train()


def stages_after(step: int, config: RunConfig) -> list[Stage]:
    """Return the remaining stages after `step` steps; at the end of the run, the last one."""
    taken = [stage for stage in config.stages if stage.taken_steps]
    return [stage for stage in taken if stage.first_step + stage.taken_steps > step] or taken[-1:]


def one_of_each_shape(stages: Sequence[Stage]) -> list[Stage]:
    """Return one stage per shape of micro-batch and set of objectives, the largest first."""
    by_shape = {
        (
            stage.micro_batch_tokens,
            stage.sequence_length,
            stage.room_for_labels,
            *(each.name for each in stage.objectives),
        ): stage
        for stage in stages
    }
    return [by_shape[shape] for shape in sorted(by_shape, reverse=True)]


def largest_of(shapes: Sequence[Stage]) -> list[Stage]:
    """Return the first of the shapes and the first that a teacher takes part in, which needs memory of its own."""
    first_taught = next((stage for stage in shapes if is_taught(stage.objectives)), shapes[0])
    return [shapes[0]] if first_taught is shapes[0] else [shapes[0], first_taught]


def _as_cut(stage: Stage, world_size: int) -> Stage:
    """Return the stage with the micro-batch size of training on `world_size` ranks; evaluation uses the full size."""
    return replace(stage, micro_batch_tokens=batch_arithmetic(stage, world_size).micro_batch_tokens)


def first_batch(
    stage: StageShape, data: DataSettings, config: RunConfig, shard_sets: list[ShardSet], ranks: Ranks
) -> Batch:
    """Return a micro-batch of valid data (train data if there is none) in the stage's shape, masked as `data` sets it,
    on the rank's device."""
    split: Split = "valid" if has_valid_split(shard_sets) else "train"
    rank, seed, tokens = (ranks.rank, ranks.world_size), config.training.seed, stage.micro_batch_tokens
    batches = evaluation_batches(shard_sets, data, stage, seed, *rank, tokens, split)
    return next(batches).batch.to(ranks.device)


def _loss_of(engine: Engine, stage: Stage, batch: Batch) -> Callable[[], torch.Tensor]:
    def loss() -> torch.Tensor:
        output: Output = engine.forward(batch, objectives=[each.name for each in stage.objectives])
        return functools.reduce(torch.add, (sums["loss"] for sums in output.values()))

    return loss
