"""Rows 23 and 24: ranks killed in a step and in the middle of a save, checkpoints torn; the same command goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.conftest import Training
from tests.system.plain_ranks import final_tensors, finish, losses, newest_checkpoint, run, start

pytestmark = pytest.mark.spawn

SETTINGS = (
    "training.max_steps=12",
    "checkpoint.every_steps=3",
    "evaluation.every_steps=6",
    "health.heartbeat_timeout_seconds=6",
)
KILLED = pytest.mark.fault(
    row="23",
    fault="SIGKILL of one rank in the middle of a save and in the middle of a step, ZeRO 0 to 3",
    required="the other rank names it and leaves; the same command ends with bitwise the same losses and weights",
)
TORN = pytest.mark.fault(
    row="24",
    fault="the newest checkpoint with 64 flipped bytes in one rank's file, `latest` pointing nowhere, on two ranks",
    required="both ranks take the one before, with a warning, and end with bitwise the same weights",
)


@pytest.fixture(scope="module")
def straight(training: Callable[..., Training]) -> Callable[[int], Training]:
    """The run of two ranks at a ZeRO stage that was never stopped; each made once."""
    made: dict[int, Training] = {}

    def of_stage(stage: int) -> Training:
        if stage not in made:
            made[stage] = training(*SETTINGS, f"zero.stage={stage}")
            run(made[stage], 2)
        return made[stage]

    return of_stage


def kill_one(killed: Training, rank: int, **where: object) -> None:
    """Start, have the rank killed there, and see the other one leave over it."""
    ranks = start(killed, 2, trouble={"kill": {"rank": rank, **where}})
    statuses = finish(ranks, timeout=240)
    other = ranks[1 - rank]
    assert statuses[rank] == -9 and statuses[1 - rank] not in (0, 75), (statuses, other.output)
    assert f"rank {rank} (" in other.output, other.output
    assert "Traceback (most recent call last)" not in other.output, other.output


def assert_same_run(found: Training, expected: Training) -> None:
    assert losses(found) == losses(expected)
    assert final_tensors(found) == final_tensors(expected)
    assert len(losses(found)) == 12


@KILLED
@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_row_23_a_rank_killed_in_a_save_and_in_a_step_leaves_a_run_that_goes_on_bitwise(stage, training, straight):
    killed = training(*SETTINGS, f"zero.stage={stage}")
    kill_one(killed, 1, writing="step-00000006/rank-00001")
    kill_one(killed, 0, step=8)
    output = run(killed, 2)
    assert "resuming after step 6 of 12" in output
    assert_same_run(killed, straight(stage))


@KILLED
@pytest.mark.slow
@pytest.mark.parametrize("name", ["rank-00000", "state.json", "checkpoint.json"])
@pytest.mark.parametrize("step", [3, 6], ids=["the first save", "a later save"])
def test_row_23_the_first_rank_killed_at_any_place_of_a_save_goes_on_bitwise(name, step, training, straight):
    killed = training(*SETTINGS, "zero.stage=2")
    kill_one(killed, 0, writing=f"step-{step:08d}/{name}")
    output = run(killed, 2)
    assert ("resuming after step 3 of 12" if step == 6 else "beginning 12 steps") in output
    assert "its save never ended" in output
    assert_same_run(killed, straight(2))


@KILLED
@pytest.mark.slow
def test_row_23_ranks_killed_in_step_after_step_go_on_bitwise(training, straight):
    killed = training(*SETTINGS, "zero.stage=2", "checkpoint.every_steps=1")
    for step in (2, 3, 5, 8, 11):
        kill_one(killed, step % 2, step=step)
    run(killed, 2)
    assert_same_run(killed, straight(2))


@TORN
@pytest.mark.slow
def test_row_24_a_damaged_newest_checkpoint_is_passed_over_by_both_ranks_for_the_one_before(straight):
    whole = straight(2)
    expected = final_tensors(whole)
    flip_bytes(newest_checkpoint(whole) / "rank-00001-of-00002.safetensors")
    (whole.output_dir / "checkpoints" / "latest").write_text("global_step12")  # as DeepSpeed's; nobody reads it
    output = run(whole, 2)
    assert "warning: checkpoint" in output and "step-00000012 is damaged and skipped: rank-00001" in output
    assert "resuming after step 9 of 12" in output
    assert final_tensors(whole) == expected


def flip_bytes(path: Path) -> None:
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(byte ^ 0xFF for byte in data[middle : middle + 64])
    path.write_bytes(data)
