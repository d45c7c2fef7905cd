from __future__ import annotations

import torch

from trainer.api import EXTENSIONS
from trainer.config.run_config import RunConfig
from trainer.preflight.checks import CHECKS, PlannedRun
from trainer.preflight.finding import Finding


def findings_of(config: RunConfig, *names: str, num_ranks: int = 2) -> list[Finding]:
    """What the checks of these names find for a run on CPUs."""
    run = PlannedRun(config, num_ranks, torch.device("cpu"), EXTENSIONS)
    return [finding for check in CHECKS if check.name in names for finding in check.findings(run)]
