"""Large tensors reuse the pages of those before them once freed memory is kept."""

from __future__ import annotations

import os
import sys

import pytest

from tests.support import fork_server

PROGRAM = """
import resource, sys, torch
from trainer.distributed.memory import keep_freed_memory

if sys.argv[1] == "kept":
    assert keep_freed_memory()
total = torch.zeros(1)
for _ in range(10):  # 64 MiB, as large as the logits of a micro-batch
    torch.ones(16 << 20).sum()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    total += torch.ones(16 << 20).sum()
print(int(total), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 5 * (64 << 20) // 4096


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs glibc's mallopt")
def test_kept_memory_is_not_mapped_again() -> None:
    def run(mode: str) -> tuple[int, int]:
        done = fork_server.run(["-c", PROGRAM, mode], fork_server.ROOT, os.environ | fork_server.FIXED)
        total, faults = map(int, done.stdout.split())
        return total, faults

    by_default, kept = run("default"), run("kept")
    assert by_default[0] == kept[0] == 5 * (16 << 20)
    assert kept[1] < PAGES // 4
    assert by_default[1] >= PAGES
