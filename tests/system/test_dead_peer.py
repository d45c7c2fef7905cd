"""A peer that answers no more while the heartbeat is patient: the process groups' own timeout ends the run."""

from __future__ import annotations

import signal
import time

import pytest

from tests.support.plain_ranks import start, wait_until
from trainer.distributed.watchdog import LOST_RANK_EXIT_STATUS
from trainer.tracking.status import read_status

pytestmark = [pytest.mark.slow, pytest.mark.spawn]

TIMEOUT_SECONDS = 30  # on a busy machine one rank sets up for longer than the other by many seconds
DEADLINE_SECONDS = 150
"""The timeout, two beats of the watchdog (5 s each) to see who is silent, and a busy machine."""
SETTINGS = (
    "training.max_steps=500000",
    "checkpoint.every_steps=500000",
    "evaluation.every_steps=500000",
    f"distributed.timeout_seconds={TIMEOUT_SECONDS}",
    "health.heartbeat_timeout_seconds=600",
)


@pytest.mark.fault(
    row="31b",
    fault="a rank is stopped while the others wait for it in the groups of ZeRO",
    required="all others leave by the deadline, the rank named, with their stacks in output_dir",
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_row_31b_the_groups_own_timeout_ends_a_run_whose_peer_is_dead(stage, training, observed):
    precision = "bf16" if stage == 1 else "fp32"  # whose gradients are exchanged within the backward
    run = training(*SETTINGS, f"zero.stage={stage}", f"training.precision={precision}")
    ranks = start(run, 2)
    wait_until(lambda: run.last_logged_step() >= 3, ranks)
    ranks[1].process.send_signal(signal.SIGSTOP)
    stopped_at = time.monotonic()
    try:
        status = ranks[0].process.wait(timeout=DEADLINE_SECONDS)
        seconds = time.monotonic() - stopped_at
        assert seconds >= TIMEOUT_SECONDS - 1, "something else than the timeout ended it"
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.wait()
    said = ranks[0].output
    assert status == LOST_RANK_EXIT_STATUS, said
    assert "error: rank 1 (" in said and "crashed or became unreachable; all ranks exit" in said, said
    assert "crashed or became unreachable; all ranks exit" in said.splitlines()[-1], said
    stacks = (run.output_dir / "stacks" / "rank-0.txt").read_text()
    assert "its stacks:" in stacks and "watchdog.py" in stacks and "its stacks:" not in said, said
    assert read_status(run.output_dir).state == "failed" and "rank 1 (" in read_status(run.output_dir).cause
    observed(
        f"ZeRO {stage}: the other had named it and left after {seconds:.0f} s, at a timeout of {TIMEOUT_SECONDS} s",
        lost="the steps since the last checkpoint, which are taken again",
    )
