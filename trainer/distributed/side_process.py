"""Processes that rank 0 starts during training: their environment, and their reports of failures."""

from __future__ import annotations

import os
import signal

from data_prep.storage import storage

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LONGEST_REASON = 500


def side_environment() -> dict[str, str]:
    """The environment of this process without the launcher's variables and without GPUs, which training uses."""
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    return environment | {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


def failure_reason(returncode: int, stderr: str, name: str) -> str:
    """What a failed process reported to be wrong, without the fix, which is that of a command; or how it ended."""
    if returncode >= 0:
        text = storage.hide_secrets(stderr.strip())
        text = text[text.rfind("error: ") :] if "error: " in text else text
        reason = text.removeprefix("error: ").partition(". Fix: ")[0]
        return reason[-_LONGEST_REASON:] or f"the {name} process exited with status {returncode}"
    signal_name = next((each.name for each in signal.Signals if each == -returncode), f"signal {-returncode}")
    return f"the {name} process was killed by {signal_name}"
