"""One optimizer step: what the host waits for. Gradients and counts: test_contract5.py, test_train.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.toy_processes import finish, start_ranks

WORKER = Path(__file__).with_name("host_reads_worker.py")

# DeepSpeed 0.19.8 itself looks whether the gradient's norm is finite and whether it has to be clipped.
DEEPSPEED_READS = {1: 2, 2: 4, 3: 1}


def counted(folder: Path, *overrides: str) -> list[dict[str, int]]:
    """Of each step of a run of three micro-batches a step: {"synchronizations", "reads"}."""
    ((status, stdout, stderr),) = finish(start_ranks([str(WORKER), str(folder), *overrides], world_size=1), timeout=600)
    assert status == 0, stderr
    return json.loads(stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.spawn
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_step_never_synchronizes_the_device_and_reads_no_more_than_deepspeed_does(tmp_path: Path, stage: int) -> None:
    found = counted(tmp_path, f"zero.stage={stage}")
    assert found == [{"synchronizations": 0, "reads": DEEPSPEED_READS[stage]}] * 2


@pytest.mark.slow
@pytest.mark.spawn
def test_the_throughput_timer_of_deepspeed_would_be_counted(tmp_path: Path) -> None:
    found = counted(tmp_path, "zero.stage=1", "deepspeed.timers.throughput.enabled=true")
    assert all(step["synchronizations"] >= 3 for step in found)
