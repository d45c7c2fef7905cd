"""Peak memory of a rank, and the error for too little memory."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from data_prep.base.errors import UserError
from trainer.distributed.process_group import Ranks, gather_objects


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process: on CUDA the memory reserved by torch, else the resident set."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else _peak_resident_bytes()


def peak_memory_of_ranks(ranks: Ranks) -> list[int]:
    """Return `peak_memory_bytes` of every rank, on every rank."""
    return gather_objects(peak_memory_bytes(ranks.device), ranks)


@contextlib.contextmanager
def explain_out_of_memory(ranks: Ranks, when: str) -> Iterator[None]:
    """Convert out-of-memory errors of the device or Python to a `UserError` with the setting to lower.

    Raises:
        UserError: memory ran out in the block.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"rank {ranks.rank} ran out of memory on {ranks.device} {when} ({lines[0]})",
            fix="lower training.micro_batch_tokens, set training.activation_checkpointing=true, or raise zero.stage",
            code="out-of-memory",
        ) from None


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether this error or one of its causes is an out-of-memory error of torch (on any device) or Python."""
    while error is not None:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _peak_resident_bytes() -> int:
    # Preferred to getrusage, whose peak includes the memory of the parent at the fork.
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
