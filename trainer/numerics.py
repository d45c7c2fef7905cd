"""What a run's numbers depend on beside its settings: compiled blocks, attention kernel, build of torch.

Two choices among kernels give losses that agree within rounding and not bitwise. So all ranks make the same choice, a
checkpoint stores it, and a resumed run compares it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil

import torch

from trainer.config import RunConfig
from trainer.model.attention import choose_kernel
from trainer.ranks.distributed import Ranks, gather_objects

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def missing_for_compilation(device_type: str) -> str | None:
    """What this host lacks for compiled blocks that pay off ("cuda" or "cpu" as `device_type`); None if nothing."""
    if device_type != "cuda":
        return "a CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "the package triton"
    if not any(shutil.which(name) for name in (os.environ.get("CC"), "gcc", "cc", "clang") if name):
        return "a C compiler (gcc, cc or clang, or the one that CC names)"
    return None


def with_compilation_decided(config: RunConfig, ranks: Ranks) -> tuple[RunConfig, str | None]:
    """The configuration with `training.compile=auto` replaced by true or false, the same on all ranks.

    Returns a warning too, where CUDA ranks have to do without. All ranks call it together. At ZeRO stage 3 nothing is
    compiled: DeepSpeed's hooks, which gather a module's weights, break every block into a dozen graphs.
    """
    if config.training.compile != "auto":
        return config, None
    missing = gather_objects(missing_for_compilation(ranks.device.type), ranks)
    if config.zero.stage == 3:
        missing = ["a ZeRO stage below 3"] * ranks.world_size
    lacking = [rank for rank, what in enumerate(missing) if what is not None]
    training = config.training.model_copy(update={"compile": not lacking})
    warning = None
    if lacking and ranks.device.type == "cuda":
        warning = (
            f"training.compile=auto: nothing is compiled, because rank {lacking[0]} lacks {missing[lacking[0]]}. "
            "Fix: provide it on every host, or set training.compile=false"
        )
    return config.model_copy(update={"training": training}), warning


def describe_numerics(config: RunConfig, device: torch.device) -> dict[str, str]:
    """By name, for a checkpoint: what changes the bits of a loss and is no setting."""
    model, dtype = config.model, _DTYPES[config.training.precision]
    lengths = dict.fromkeys(phase.sequence_length for phase in config.phases)
    dropout = model.attention_probs_dropout_prob
    kernels = dict.fromkeys(choose_kernel(device, dtype, model.head_size, dropout, length) for length in lengths)
    return {
        "attention kernel": ", ".join(kernels),
        "torch build": torch.__version__,
    }
