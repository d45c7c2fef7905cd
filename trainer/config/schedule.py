"""Learning rate, masking rate and global batch size as pure functions of the step: resuming needs no other state."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import replace

from trainer.config.batch_arithmetic import StageShape
from trainer.config.data_settings import DataSettings
from trainer.config.training_settings import BatchWarmup, ScheduleSettings


def learning_rate(step: int, max_steps: int, peak: float, schedule: ScheduleSettings) -> float:
    """Return the learning rate of the step after `step` completed ones (0 <= step < max_steps).

    The warmup rises linearly and reaches the peak at its last step; no step has rate 0 unless the schedule ends there.
    `linear`, `cosine` and `one_minus_sqrt` (1 - sqrt(x)) fall from the end of the warmup to `final_ratio * peak`;
    `warmup_stable_decay` stays at the peak and falls over the steps of its decay (Hu et al. 2024, MiniCPM, section 4;
    Haegele et al. 2024, section 3, compare the shapes).
    """
    warmup_steps = schedule.warmup.in_steps(max_steps)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    is_stable = schedule.name == "warmup_stable_decay"
    decay_steps = schedule.decay_duration.in_steps(max_steps) if is_stable else max_steps - warmup_steps
    elapsed = step - (max_steps - decay_steps)
    if elapsed <= 0:
        return peak
    remaining = _remaining(schedule.shape, elapsed / decay_steps)
    return peak * (schedule.final_ratio + (1.0 - schedule.final_ratio) * remaining)


def _remaining(shape: str, progress: float) -> float:
    """Return what is left of the peak at `progress` (0 to 1) of a decay to 0."""
    if shape == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0 - (math.sqrt(progress) if shape == "one_minus_sqrt" else progress)


RATE_JUMP = 1.1
"""Ratio of two rates, in either direction, from which a changed `max_steps` is a jump of the learning rate."""


def rate_jump_warning(
    step: int,
    old_max_steps: int,
    max_steps: int,
    peak: float,
    old_schedule: ScheduleSettings,
    schedule: ScheduleSettings,
) -> str | None:
    """Warn if a run of `old_max_steps`, resumed after `step` steps with `max_steps`, jumps to another learning rate.

    Only before the decay of `warmup_stable_decay` are the rates of a short and of a long run the same. The schedules
    are the run's before and now, in steps.
    """
    old = learning_rate(min(step, old_max_steps - 1), old_max_steps, peak, old_schedule)
    new = learning_rate(step, max_steps, peak, schedule)
    if max(old, new) <= RATE_JUMP * min(old, new):
        return None
    problem = (
        f"training.max_steps changed from {old_max_steps} to {max_steps}: the learning rate jumps from {old:.1e} to "
        f"{new:.1e} at step {step + 1} (schedule.name={schedule.name})"
    )
    if schedule.name == "warmup_stable_decay":
        last = old_max_steps - old_schedule.decay_duration.steps
        return f"{problem}. Extend the run from a checkpoint before the decay: --resume-from STEP with STEP <= {last}"
    return (
        f"{problem}. For runs that may be extended use schedule.name=warmup_stable_decay, and extend them from a "
        "checkpoint before the decay with --resume-from STEP"
    )


def masking_rate(step: int, max_steps: int, data: DataSettings) -> float:
    """Return the mean masking rate of the step after `step` completed ones (0 <= step < max_steps)."""
    return data.law.rate_of_step(step / max(1, max_steps - 1))


def global_batch_tokens(step: int, stage: StageShape) -> int:
    """Return the tokens in the global batch after `step` completed steps of the stage.

    During the batch-size ramp-up the sizes are the multiples of the first one, each for the same number of steps or
    one step more; see `BatchWarmup`.
    """
    warmup = stage.batch_warmup
    if warmup is None or step >= warmup.duration.steps:
        return stage.global_batch_tokens
    return warmup.initial_tokens * (1 + step * _num_ramp_sizes(stage) // warmup.duration.steps)


def global_batch_sizes(stage: StageShape) -> list[tuple[int, int]]:
    """Return (first step, tokens) for every size of the stage's global batches."""
    warmup, sizes = stage.batch_warmup, {}
    if warmup is not None:
        num_sizes = _num_ramp_sizes(stage)
        # Of sizes that begin at one step, in a ramp-up of fewer steps than sizes, the last counts.
        sizes = {-(-n * warmup.duration.steps // num_sizes): warmup.initial_tokens * (n + 1) for n in range(num_sizes)}
        sizes[warmup.duration.steps] = stage.global_batch_tokens
    return list(sizes.items()) or [(0, stage.global_batch_tokens)]


def _num_ramp_sizes(stage: StageShape) -> int:
    """Return the number of batch sizes before the full one."""
    assert stage.batch_warmup is not None
    return -(-stage.global_batch_tokens // stage.batch_warmup.initial_tokens) - 1


def tokens_of_stage(stage: StageShape, first: int, stop: int) -> int:
    """Return the tokens in the global batches of the stage's steps `first` to `stop` - 1."""
    sizes = global_batch_sizes(stage)
    ends = [*(start for start, _ in sizes[1:]), max(stop, sizes[-1][0])]
    spans = ((max(first, start), min(stop, end), tokens) for (start, tokens), end in zip(sizes, ends, strict=True))
    return sum((end - start) * tokens for start, end, tokens in spans if end > start)


def steps_for_tokens(tokens: int, stages: Sequence[StageShape]) -> int:
    """Return the fewest first steps of `stages` with at least so many tokens; one more than all if they have fewer."""
    steps = 0
    for stage in stages:
        if tokens > (inside := tokens_of_stage(stage, 0, stage.steps)):
            tokens -= inside
            steps += stage.steps
            continue
        return steps + bisect.bisect_left(range(stage.steps), tokens, key=lambda step: tokens_of_stage(stage, 0, step))
    return steps + 1


def steps_of_epochs(epochs: float, num_rows: int, is_mixture: bool, stage: StageShape) -> int:
    """Return the steps of so many epochs of `num_rows` rows, which the stage reads from the start of an epoch on.

    What is left of an epoch and fills no global batch is dropped. Epochs of a mixture do not end, so that its steps are
    rounded up.
    """
    length = stage.sequence_length
    if is_mixture:
        tokens = math.ceil(epochs * num_rows) * length
        return steps_for_tokens(tokens, [replace(stage, steps=tokens)])
    step, ramp = 0, stage.batch_warmup.duration.steps if stage.batch_warmup else 0
    left = float(epochs)
    while left > 0:
        rows = num_rows if left >= 1 else int(left * num_rows)
        ends = range(step, step + rows + 1)
        inside = bisect.bisect_right(ends, rows * length, key=lambda end: tokens_of_stage(stage, step, end)) - 1
        num_equal = int(left) if step >= ramp and left >= 1 else 1  # epochs of equally many steps
        step, left = step + num_equal * inside, left - num_equal
    return step


def steps_of_last_tokens(tokens: int, stages: Sequence[StageShape]) -> int:
    """Return the fewest last steps of `stages` with at least so many tokens; one more than all if they have fewer."""
    before = sum(tokens_of_stage(stage, 0, stage.steps) for stage in stages) - tokens
    earlier_steps = steps_for_tokens(before + 1, stages) - 1 if before >= 0 else -1
    return sum(stage.steps for stage in stages) - earlier_steps


def with_ramp_steps(warmup: BatchWarmup, global_batch_tokens: int) -> BatchWarmup:
    """Return the ramp-up with its length in steps: each of its sizes has the same number of steps."""
    num_sizes = max(1, -(-global_batch_tokens // warmup.initial_tokens) - 1)
    mean_tokens = warmup.initial_tokens * (num_sizes + 1) / 2
    duration = warmup.duration.resolved(0, lambda tokens: max(1, round(tokens / mean_tokens)))
    return warmup.model_copy(update={"duration": duration})


def with_schedule_steps(
    schedule: ScheduleSettings, stages: Sequence[StageShape], planned: Sequence[StageShape] | None = None
) -> ScheduleSettings:
    """Return the schedule with warmup and decay in steps.

    Args:
        stages: the steps that the schedule runs over; the decay ends with them.
        planned: the stages that the warmup is counted in, where the run ends before they do.
    """
    max_steps = sum(stage.steps for stage in stages)
    warmup = schedule.warmup.resolved(max_steps, lambda tokens: steps_for_tokens(tokens, planned or stages))
    decay = schedule.decay_duration.resolved(max_steps, lambda tokens: steps_of_last_tokens(tokens, stages))
    return schedule.model_copy(update={"warmup": warmup, "decay_duration": decay})
