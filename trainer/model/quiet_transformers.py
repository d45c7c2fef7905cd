"""Run transformers without progress bars, warnings and requests to the Hub."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Within the block transformers shows no progress bars and no warnings, and sends no request to the Hub."""
    os.environ.setdefault("USE_HUB_KERNELS", "NO")  # read on import: the package `kernels` fetches code from the Hub
    import torch
    from huggingface_hub import constants  # the variable HF_HUB_OFFLINE is only read when this is first imported
    from transformers.utils import logging as transformers_logging

    if not torch.cuda.is_available():
        # Saving and fitting use accelerate, which imports deepspeed if it is installed, which would print a warning.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    offline = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
