"""Learning rate and masking rate as pure functions of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from trainer.settings.data import DataSettings
from trainer.settings.training import ScheduleSettings


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


def masking_rate(step: int, max_steps: int, data: DataSettings) -> float:
    """The share of tokens to predict in the step that follows `step` completed ones (0 <= step < max_steps).

    Linear from `data.mlm_probability` in the first step to `data.final_mlm_probability` in the last (Yang et al. 2023,
    "Learning Better Masking for Better Language Model Pre-training", find a falling rate to serve best).
    """
    progress = step / max(1, max_steps - 1)
    return data.mlm_probability + (data.evaluated_mlm_probability - data.mlm_probability) * progress
