"""Memory of the C allocator on the CPU: keep what a step frees for the next step.

By default glibc maps every large tensor with `mmap` and returns it to the system when it is freed. Each step then pays
for the same pages again: a third to half of the CPU time of a small model's step is spent in the kernel
(`tests/benchmarks/results/allocator.md`). Results are bitwise the same with and without.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # parameters of mallopt(3), from malloc.h
_NEVER_TRIM = 2**31 - 1
_TOP_PAD_BYTES = 64 << 20


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory of this process; returns False where the C library has no `mallopt`.

    Resident memory stays at its peak instead of falling between steps; the peak itself is about the same.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # macOS, musl
        return False
    settings = {_MMAP_MAX: 0, _TRIM_THRESHOLD: _NEVER_TRIM, _TOP_PAD: _TOP_PAD_BYTES}
    results = [mallopt(parameter, value) for parameter, value in settings.items()]
    return results == [1] * len(settings)
