from __future__ import annotations

import torch

from trainer.api import EXTENSIONS
from trainer.config.run_config import RunConfig
from trainer.preflight.checks import CHECKS
from trainer.preflight.finding import Finding
from trainer.preflight.plan import GPUS, PlannedRun, Speed


def planned(
    config: RunConfig,
    num_ranks: int = 2,
    device: str = "cpu",
    gpu: str | None = None,
    tokens_per_second: float | None = None,
) -> PlannedRun:
    """A run that could start on this machine."""
    speed = None if tokens_per_second is None else Speed("given", tokens_per_second=tokens_per_second)
    of_ranks = None if gpu is None else GPUS[gpu]
    return PlannedRun(config, num_ranks, torch.device(device), EXTENSIONS, gpu=of_ranks, speed=speed)


def findings_of(config: RunConfig, *names: str, num_ranks: int = 2, gpu: str | None = None) -> list[Finding]:
    """What the checks of these names find for a run."""
    run = planned(config, num_ranks, gpu=gpu)
    return [finding for check in CHECKS if check.name in names for finding in check.findings(run)]
