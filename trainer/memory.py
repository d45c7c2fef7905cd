"""How much memory a rank has needed at most."""

from __future__ import annotations

import resource
import sys

import torch

from trainer.distributed import Ranks, gather_objects


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this process has held so far: on CUDA what torch reserved there, else its resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_memory_of_ranks(ranks: Ranks) -> list[int]:
    """`peak_memory_bytes` of every rank, on every rank."""
    return gather_objects(peak_memory_bytes(ranks.device), ranks)
