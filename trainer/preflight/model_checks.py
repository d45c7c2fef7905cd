"""Checks of what would end a run after its ranks have joined: precision, DeepSpeed's sections, initial weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from trainer.checkpoint.format import list_steps
from trainer.config.run_config import RunConfig
from trainer.engine.engine import check_precision
from trainer.preflight.deepspeed_sections import check_values, missing_packages, unwritable_output
from trainer.preflight.finding import Finding
from trainer.registry.starting_weights import look_at_initial_weights


def check_device(config: RunConfig, world_size: int, device: torch.device) -> Iterator[Finding]:
    """Check that the device supports the precision, and that DeepSpeed accepts its sections."""
    check_precision(config, device.type)
    check_values(config, world_size, device.type)
    # The run itself may start on other hosts, with packages and disks of their own.
    for text in (*missing_packages(config, world_size), *unwritable_output(config, world_size)):
        yield Finding("warn", "deepspeed", f"{text}; ignore this if the run starts on hosts that have it")
    given = ", with settings of its own" if config.deepspeed else ""
    yield Finding("ok", "deepspeed", f"{config.training.precision} at ZeRO {config.zero.stage} on {device.type}{given}")


def check_initial_weights(config: RunConfig) -> Iterator[Finding]:
    """Check that the initial weights exist and fit the model; a run with checkpoints resumes from those."""
    if config.init_from is not None and not list_steps(config.output_dir)[0]:
        for line in look_at_initial_weights(config.model, config.init_from, config.tracking.uri, None):
            yield Finding("ok", "init_from", line)
