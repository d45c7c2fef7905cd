"""What torch does that `trainer` works around.

A test that fails here is good news: its message names the code that may be simpler now.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from tests.support.free_ports import free_port
from tests.workarounds.new_process import SLEEPER, number_of_sleeper, run_python


def test_variable_length_attention_has_no_kernel_for_the_cpu() -> None:
    from torch.nn.attention.varlen import varlen_attn

    query = torch.zeros(4, 1, 16, dtype=torch.bfloat16)
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(NotImplementedError):
        varlen_attn(query, query, query, offsets, offsets, 4, 4)
        pytest.fail("trainer/model/cpu_attention.py may be taken out")


@pytest.mark.spawn
def test_new_groups_have_not_the_timeout_of_the_first_one() -> None:
    code = """
import datetime, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=datetime.timedelta(seconds=7))
seconds = lambda group: group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
print(seconds(dist.group.WORLD), seconds(dist.new_group([0])))
dist.destroy_process_group()
"""
    answer = run_python(code)
    first, second = map(float, answer.stdout.split())
    assert first == 7
    assert second != 7, "set_timeout_on_all_groups of distributed/process_group.py may be taken out"


def test_a_store_that_is_not_there_yet_is_waited_for_with_stacks_in_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(torch.distributed.DistError):
        torch.distributed.TCPStore("127.0.0.1", free_port(), 2, is_master=False, timeout=timedelta(seconds=1))
    assert "frame #" in capfd.readouterr().err, (
        "_open_store of distributed/rendezvous.py need not look for the store itself"
    )


def test_starting_a_data_loader_draws_from_the_global_random_state() -> None:
    before = torch.get_rng_state()
    try:
        next(iter(torch.utils.data.DataLoader([1, 2])))
        assert not torch.equal(torch.get_rng_state(), before), "data/loader.py need not give a generator of its own"
    finally:
        torch.set_rng_state(before)


def test_the_lock_of_a_build_that_was_killed_is_never_taken_over(tmp_path: Path) -> None:
    from torch.utils.file_baton import FileBaton

    (tmp_path / "lock").touch()
    assert not FileBaton(str(tmp_path / "lock")).try_acquire(), (
        "the doctor's look at the locks of native ops in preflight/machine_checks.py may be taken out"
    )


@pytest.mark.slow
@pytest.mark.spawn
def test_torchrun_dies_of_the_signal_that_its_ranks_save_on(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(SLEEPER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    launcher = subprocess.Popen(
        [*command, str(tmp_path / "rank.py"), str(tmp_path / "pid")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        rank = number_of_sleeper(tmp_path / "pid")
        launcher.send_signal(signal.SIGUSR1)
        status = launcher.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)
    finally:
        launcher.kill()
    assert status == -signal.SIGUSR1, (
        "slurm/pretrain.sh and kubernetes/train_job.yaml need not have torchrun ignore the signal"
    )
