"""Rows 23, 24 and 54: ranks and data workers killed, in a step and in a save, checkpoints torn; resumed bitwise."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.plain_ranks import final_tensors, finish, losses, newest_checkpoint, run, start
from tests.system.conftest import Training
from trainer.distributed.rendezvous import LOST_RANK_EXIT_STATUS
from trainer.tracking.status import read_status

pytestmark = pytest.mark.spawn

HEARTBEAT_SECONDS = 6
LEAVING_SECONDS = 60
"""Beyond the heartbeat: the judgment, the disk and the store (8 s where nothing hangs), and a busy machine."""
SETTINGS = (
    "training.max_steps=12",
    "checkpoint.every_steps=3",
    "evaluation.every_steps=6",
    f"health.heartbeat_timeout_seconds={HEARTBEAT_SECONDS}",
)
KILLED = pytest.mark.fault(
    row="23",
    fault="SIGKILL of one rank in the middle of a save and in the middle of a step, ZeRO 0 to 3",
    required="the other rank names it and leaves; the same command ends with bitwise the same losses and weights",
)
LOST = "the steps since the last checkpoint, which are taken again"
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


def kill_one(killed: Training, rank: int, **where: object) -> float:
    """Start, have the rank killed there, and see the other one leave over it; after how many seconds it had left."""
    ranks = start(killed, 2, trouble={"kill": {"rank": rank, **where}})
    dead, other = ranks[rank], ranks[1 - rank]
    assert finish([dead], timeout=240) == [-9], dead.output
    died_at = time.monotonic()
    (status,) = finish([other], timeout=HEARTBEAT_SECONDS + LEAVING_SECONDS)
    assert status not in (0, 75), (status, other.output)
    assert f"rank {rank} (" in other.output, other.output
    assert "Traceback (most recent call last)" not in other.output, other.output
    return time.monotonic() - died_at


def run_again(killed: Training) -> tuple[str, int]:
    """Run the same command to the end; what it said, and how many steps that had been logged it took again."""
    logged = killed.last_logged_step()
    output = run(killed, 2)
    resumed = re.search(r"resuming after step (\d+) of", output)
    return output, logged - (int(resumed[1]) if resumed else 0)


def assert_same_run(found: Training, expected: Training) -> None:
    assert losses(found) == losses(expected)
    assert final_tensors(found) == final_tensors(expected)
    assert len(losses(found)) == 12


@KILLED
@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_row_23_a_rank_killed_in_a_save_and_in_a_step_leaves_a_run_that_goes_on_bitwise(
    stage, training, straight, observed
):
    killed = training(*SETTINGS, f"zero.stage={stage}")
    seconds = kill_one(killed, 1, writing="step-00000006/rank-00001"), kill_one(killed, 0, step=8)
    output, again = run_again(killed)
    assert "resuming after step 6 of 12" in output
    assert_same_run(killed, straight(stage))
    observed(
        f"ZeRO {stage}: the other rank had left after {seconds[0]:.0f} and {seconds[1]:.0f} s; goes on bitwise, "
        f"{again} step(s) taken again",
        lost=LOST,
    )


@KILLED
@pytest.mark.slow
@pytest.mark.parametrize("name", ["rank-00000", "state.json", "checkpoint.json"])
@pytest.mark.parametrize("step", [3, 6], ids=["the first save", "a later save"])
def test_row_23_the_first_rank_killed_at_any_place_of_a_save_goes_on_bitwise(name, step, training, straight, observed):
    killed = training(*SETTINGS, "zero.stage=2")
    kill_one(killed, 0, writing=f"step-{step:08d}/{name}")
    output, again = run_again(killed)
    assert ("resuming after step 3 of 12" if step == 6 else "starting training: 12 steps") in output
    assert "its save was interrupted" in output
    assert_same_run(killed, straight(2))
    observed(f"killed in the save of step {step}: goes on bitwise, {again} steps taken again", lost=LOST)


@KILLED
@pytest.mark.slow
def test_row_23_a_rank_killed_while_it_keeps_the_counts_of_sentence_pairs_goes_on_bitwise(training, straight, observed):
    killed = training(*SETTINGS, "zero.stage=1")
    kill_one(killed, 0, writing="pair_counts/")
    assert not list(killed.folder.rglob("pair_counts/[!.]*"))
    run_again(killed)
    assert len(list(killed.folder.rglob("pair_counts/[!.]*"))) == 1
    assert_same_run(killed, straight(1))
    observed("killed in writing the counts: nothing of them is used, bitwise the same run")


@KILLED
@pytest.mark.slow
def test_row_23_ranks_killed_in_step_after_step_go_on_bitwise(training, straight, observed):
    killed = training(*SETTINGS, "zero.stage=2", "checkpoint.every_steps=1")
    seconds = [kill_one(killed, step % 2, step=step) for step in (2, 3, 5, 8, 11)]
    run(killed, 2)
    assert_same_run(killed, straight(2))
    observed(f"killed in 5 steps of 12: the other rank had left after {max(seconds):.0f} s at most, goes on bitwise")


@pytest.mark.fault(
    row="54",
    fault="SIGKILL of one of a rank's two data workers in the middle of a step, on two ranks",
    required="every rank names the worker's rank and process and data.num_workers, and leaves with 76; the same "
    "command ends with bitwise the same losses and weights",
)
@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_row_54_a_killed_data_worker_ends_the_run_on_all_ranks_and_the_run_resumes_bitwise(
    rank, training, straight, observed
):
    killed = training(*SETTINGS, "data.num_workers=2")
    ranks = start(killed, 2, trouble={"kill": {"rank": rank, "step": 8, "worker": True}})
    assert finish(ranks, timeout=240) == [LOST_RANK_EXIT_STATUS] * 2, "".join(each.output for each in ranks)
    for each in ranks:
        told = re.findall(rf"(?:error:|rank \d exits:) (a data worker of rank {rank} .*)", each.output)
        (paragraph,) = set(told)
        assert each.output.rstrip().endswith(paragraph), "the verdict is the last line too"
        assert re.search(r"process \d+", paragraph) and "data.num_workers=2" in paragraph and "memory" in paragraph
        assert "Traceback (most recent call last)" not in each.output, each.output
    status = read_status(killed.output_dir)
    assert status is not None and status.state == "failed" and f"data worker of rank {rank} " in status.cause
    output, again = run_again(killed)
    assert "resuming after step 6 of 12" in output
    assert_same_run(killed, straight(1))
    observed(f"both ranks left with {LOST_RANK_EXIT_STATUS}; resumed bitwise, {again} steps taken again", lost=LOST)


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
