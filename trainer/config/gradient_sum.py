"""How the gradients of all ranks become one: who adds them up, and in which type they travel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from trainer.config.run_config import RunConfig

SUM_OVER_RANKS = "sum over ranks"
"""Entry of a checkpoint's `numerics` about the sum; it counts if there are several ranks before and after."""
BY_NODES = ", first in nodes of "
"""The text after it counts on the same number of ranks: on another one the order of additions changes anyway."""


class GradientSum(NamedTuple):
    """How gradients are summed over several ranks; the sum is fp32 where this project exchanges them."""

    is_exchanged: bool
    """Whether `trainer/distributed/gradient_reduction.py` sums (each contribution is rounded once); else DeepSpeed."""
    sent: str
    """Type on the wire: bf16, fp16 or fp32."""


def gradient_sum(config: RunConfig, user: Mapping[str, Any] | None = None) -> GradientSum:
    """Return how a run sums gradients; `user` are its own DeepSpeed settings.

    An all-reduce in 16 bits rounds after every addition, so DeepSpeed reduces in fp32 unless the user says otherwise.
    """
    given = (config.deepspeed or {}) if user is None else user
    section = given.get("bf16", given.get("bfloat16"))
    is_at_once = not isinstance(section, Mapping) or section.get("immediate_grad_update", True)
    is_bf16 = config.training.precision == "bf16"
    is_exchanged = config.zero.stage == 1 and is_bf16 and not config.zero.offload_optimizer and bool(is_at_once)
    sent = given.get("communication_data_type")
    if sent in (None, "auto"):
        sent = "bf16" if is_exchanged else "fp32"
    return GradientSum(is_exchanged, sent)
