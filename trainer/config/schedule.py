"""Learning rate, masking rate and global batch size as pure functions of the step: resuming needs no other state."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainer.config.data_settings import DataSettings
from trainer.config.training_settings import ScheduleSettings, Stage


def learning_rate(step: int, max_steps: int, peak: float, schedule: ScheduleSettings) -> float:
    """Return the learning rate of the step after `step` completed ones (0 <= step < max_steps).

    The warmup rises linearly and reaches the peak at its last step; no step has rate 0 unless the schedule ends there.
    `linear` and `cosine` fall from the end of the warmup to `final_ratio * peak`; `warmup_stable_decay` stays at the
    peak and falls linearly over the last `decay_steps` (Hu et al. 2024, MiniCPM, section 4).
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


RATE_JUMP = 1.1
"""Ratio of two rates, either way, from which on a changed `max_steps` is a jump of the learning rate."""


def rate_jump_warning(
    step: int, old_max_steps: int, max_steps: int, peak: float, schedule: ScheduleSettings
) -> str | None:
    """Warn if a run of `old_max_steps`, resumed after `step` steps with `max_steps`, jumps to another learning rate.

    Only before the decay of `warmup_stable_decay` are the rates of a short and of a long run the same.
    """
    old = learning_rate(min(step, old_max_steps - 1), old_max_steps, peak, schedule)
    new = learning_rate(step, max_steps, peak, schedule)
    if max(old, new) <= RATE_JUMP * min(old, new):
        return None
    problem = (
        f"training.max_steps changed from {old_max_steps} to {max_steps}: the learning rate jumps from {old:.1e} to "
        f"{new:.1e} at step {step + 1} (schedule.name={schedule.name})"
    )
    if schedule.name == "warmup_stable_decay":
        last = old_max_steps - schedule.decay_steps
        return f"{problem}. Extend the run from a checkpoint before the decay: --resume-from STEP with STEP <= {last}"
    return (
        f"{problem}. For runs that may be extended use schedule.name=warmup_stable_decay, and extend them from a "
        "checkpoint before the decay with --resume-from STEP"
    )


def masking_rate(step: int, max_steps: int, data: DataSettings) -> float:
    """Return the masking rate of the step after `step` completed ones (0 <= step < max_steps).

    Linear from `data.mlm_probability` in the first step to `data.final_mlm_probability` in the last (Yang et al. 2023,
    "Learning Better Masking for Better Language Model Pre-training", find a decreasing rate best).
    """
    progress = step / max(1, max_steps - 1)
    return data.mlm_probability + (data.evaluated_mlm_probability - data.mlm_probability) * progress


def global_batch_tokens(step: int, stage: Stage) -> int:
    """Return the tokens in the global batch after `step` completed steps of the stage.

    During the batch-size ramp-up the sizes are the multiples of the first one, each for the same number of steps or
    one step more; see `BatchWarmup`.
    """
    warmup = stage.batch_warmup
    if warmup is None or step >= warmup.steps:
        return stage.global_batch_tokens
    num_sizes = -(-stage.global_batch_tokens // warmup.initial_tokens) - 1
    return warmup.initial_tokens * (1 + step * num_sizes // warmup.steps)


def global_batch_sizes(stage: Stage) -> list[tuple[int, int]]:
    """Return (first step, tokens) for every size of the stage's global batches."""
    sizes: list[tuple[int, int]] = []
    for step in range(stage.batch_warmup.steps + 1 if stage.batch_warmup is not None else 1):
        tokens = global_batch_tokens(step, stage)
        if not sizes or tokens != sizes[-1][1]:
            sizes.append((step, tokens))
    return sizes


def tokens_of_stage(stage: Stage, first: int, stop: int) -> int:
    """Return the tokens in the global batches of the stage's steps `first` to `stop` - 1."""
    warmup_steps = stage.batch_warmup.steps if stage.batch_warmup is not None else 0
    growing = range(min(first, warmup_steps), min(stop, warmup_steps))
    full_steps = max(0, stop - first) - len(growing)
    return sum(global_batch_tokens(step, stage) for step in growing) + full_steps * stage.global_batch_tokens


def tokens_of_run(stages: Sequence[Stage], steps_by_stage: Sequence[int], first: int = 0) -> int:
    """Return the tokens of a run from step `first` to its end."""
    total = 0
    for stage, steps in zip(stages, steps_by_stage, strict=True):
        total += tokens_of_stage(stage, min(first, steps), steps)
        first = max(0, first - steps)
    return total
