"""The learning rate as a pure function of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from trainer.config import ScheduleSettings


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
    if schedule.name == "cosine":
        remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        remaining = 1.0 - progress
    return peak * (schedule.final_ratio + (1.0 - schedule.final_ratio) * remaining)
