"""Peak memory, the error for too little memory, and memory that the C allocator keeps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from data_prep.base.errors import UserError
from tests.support import fork_server
from trainer.checkpoint.writer import ALONE
from trainer.distributed.memory import explain_out_of_memory, is_out_of_memory

REPOSITORY = Path(__file__).resolve().parents[3]

REFUSALS = {
    "a GPU's": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines."),
    "torch's on the CPU": RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to ..."),
    "numpy's": MemoryError("Unable to allocate 3.0 GiB for an array"),
    "Python's own": MemoryError(),
}


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
def test_a_refusal_of_memory_says_where_and_what_to_lower(refusal):
    with pytest.raises(UserError) as raised, explain_out_of_memory(ALONE, "in the warmup step"):
        raise refusal
    said = str(raised.value)
    assert said.startswith("rank 0 ran out of memory on cpu in the warmup step (") and "\n" not in said
    assert "lower training.micro_batch_tokens" in said and "zero.stage" in said


@pytest.mark.parametrize("error", [RuntimeError("a collective failed"), UserError("a shard is damaged"), KeyError("x")])
def test_other_errors_are_not_changed(error):
    with pytest.raises(type(error)) as raised, explain_out_of_memory(ALONE, "in training"):
        raise error
    assert raised.value is error


def test_too_little_memory_is_seen_behind_the_error_that_was_made_of_it():
    with pytest.raises(UserError) as raised, explain_out_of_memory(ALONE, "in training"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert is_out_of_memory(raised.value)
    assert not is_out_of_memory(RuntimeError("shapes do not match")) and not is_out_of_memory(None)


PARENT = """
import subprocess, sys
ballast = b"x" * (1000 << 20)
print(subprocess.run([sys.executable, "-c", sys.argv[1]], capture_output=True, text=True, check=True).stdout)
"""
CHILD = """
import torch
from trainer.distributed.memory import peak_memory_bytes
before = peak_memory_bytes(torch.device("cpu"))
torch.ones(300 << 20, dtype=torch.uint8)
print(before, peak_memory_bytes(torch.device("cpu")))
"""


@pytest.mark.long
@pytest.mark.spawn
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="the system does not tell a process's own peak")
def test_the_peak_is_the_processs_own_and_not_its_parents():
    command = [sys.executable, "-c", PARENT, CHILD]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY)
    before, after = map(int, done.stdout.split())
    assert before < 1000 << 20 and after - before > 100 << 20


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
