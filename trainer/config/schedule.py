"""Learning rate, masking rate and global batch as pure functions of the step: a resumed run needs no other state."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainer.config.data_settings import DataSettings
from trainer.config.training_settings import ScheduleSettings, Stage


def learning_rate(step: int, max_steps: int, peak: float, schedule: ScheduleSettings) -> float:
    """The rate for the step that follows `step` completed ones (0 <= step < max_steps).

    The warm-up rises linearly and reaches the peak with its last step; no step has rate 0 unless the schedule ends
    there. `linear` and `cosine` fall from the end of the warm-up to `final_ratio * peak`; `warmup_stable_decay` stays
    at the peak and falls linearly over the last `decay_steps` (Hu et al. 2024, MiniCPM, section 4).
    """
    warmup_steps = schedule.num_warmup_steps(max_steps)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    decay_steps = schedule.decay_steps if schedule.name == "warmup_stable_decay" else max_steps - warmup_steps
    elapsed = step - (max_steps - decay_steps)
    if elapsed <= 0:
        return peak
    progress = elapsed / decay_steps
    remaining = 0.5 * (1.0 + math.cos(math.pi * progress)) if schedule.name == "cosine" else 1.0 - progress
    return peak * (schedule.final_ratio + (1.0 - schedule.final_ratio) * remaining)


def masking_rate(step: int, max_steps: int, data: DataSettings) -> float:
    """The share of tokens to predict in the step that follows `step` completed ones (0 <= step < max_steps).

    Linear from `data.mlm_probability` in the first step to `data.final_mlm_probability` in the last (Yang et al. 2023,
    "Learning Better Masking for Better Language Model Pre-training", find a falling rate to serve best).
    """
    progress = step / max(1, max_steps - 1)
    return data.mlm_probability + (data.evaluated_mlm_probability - data.mlm_probability) * progress


def global_batch_tokens(step: int, stage: Stage) -> int:
    """Places in the global batch that follows `step` completed steps of the stage.

    In a batch warm-up the sizes are the multiples of its first one below the full one, each for the same number of
    steps, or one step more; see `BatchWarmup`.
    """
    warmup = stage.batch_warmup
    if warmup is None or step >= warmup.steps:
        return stage.global_batch_tokens
    num_sizes = -(-stage.global_batch_tokens // warmup.initial_tokens) - 1
    return warmup.initial_tokens * (1 + step * num_sizes // warmup.steps)


def global_batch_sizes(stage: Stage) -> list[tuple[int, int]]:
    """The sizes of the stage's global batches, in places, each with the steps that are completed before its first."""
    sizes: list[tuple[int, int]] = []
    for step in range(stage.batch_warmup.steps + 1 if stage.batch_warmup is not None else 1):
        tokens = global_batch_tokens(step, stage)
        if not sizes or tokens != sizes[-1][1]:
            sizes.append((step, tokens))
    return sizes


def tokens_of_stage(stage: Stage, first: int, stop: int) -> int:
    """Places in the global batches of the stage's steps `first` to `stop` - 1."""
    warmup_steps = stage.batch_warmup.steps if stage.batch_warmup is not None else 0
    growing = range(min(first, warmup_steps), min(stop, warmup_steps))
    full_steps = max(0, stop - first) - len(growing)
    return sum(global_batch_tokens(step, stage) for step in growing) + full_steps * stage.global_batch_tokens


def tokens_of_run(stages: Sequence[Stage], steps_by_stage: Sequence[int], first: int = 0) -> int:
    """Places that a run reads after its first `first` steps, to its end."""
    total = 0
    for stage, steps in zip(stages, steps_by_stage, strict=True):
        total += tokens_of_stage(stage, min(first, steps), steps)
        first = max(0, first - steps)
    return total
