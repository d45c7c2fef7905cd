"""One rank of two is stopped or killed: it is named, and nobody waits for ever."""

from __future__ import annotations

import re
import signal
import sys
import time

import pytest

from trainer.tracking.status import read_status

pytestmark = [pytest.mark.launcher, pytest.mark.spawn]
MANY_STEPS = ("training.max_steps=5000", "checkpoint.every_steps=5000", "evaluation.every_steps=5000")
HEARTBEAT_SECONDS = 15
JUDGING_SECONDS = 60
"""Beyond the heartbeat until the verdict is in status.json: a few beats (2.5 s each), and a busy machine."""
LEAVING_SECONDS = 90
"""From the verdict to the end of rank and launcher, on a busy machine."""


@pytest.mark.fault(
    row="29",
    fault="a rank stopped by SIGSTOP, and one killed, under the launcher",
    required="it is named within the timeout; the job ends with a failure and leaves no process",
)
@pytest.mark.parametrize(
    ("number", "said"),
    [
        pytest.param(
            signal.SIGSTOP,
            f"sent no heartbeat for {HEARTBEAT_SECONDS} s: crashed, stopped or unreachable; all ranks exit",
            marks=pytest.mark.slow,
        ),
        # A collective that fails tells it first, or else the heartbeat.
        (signal.SIGKILL, f"crashed or became unreachable; all ranks exit|sent no heartbeat for {HEARTBEAT_SECONDS} s"),
    ],
    ids=["stopped", "killed"],
)
def test_row_29_the_last_rank_is_named_and_the_job_ends_with_a_failure(
    number, said, training, observed, forking_python
):
    run = training(*MANY_STEPS, f"health.heartbeat_timeout_seconds={HEARTBEAT_SECONDS}")
    # A stand-in that is stopped does not stop its fork.
    process = run.start(python=forking_python if number == signal.SIGKILL else sys.executable)
    deadline = time.monotonic() + 900
    while run.last_logged_step() < 3:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the training did not come to the step in time"
        time.sleep(0.05)
    ranks = [p for p in run.processes() if any("--local_rank=1" in word for word in p.cmdline())]
    victim = min(ranks, key=lambda p: (p.create_time(), p.pid))  # the rank, not a worker of its loader
    lost_at = time.time()  # as status.json tells the time
    victim.send_signal(number)
    try:
        while (status := read_status(run.output_dir)).state == "running":
            assert time.time() - lost_at < HEARTBEAT_SECONDS + JUDGING_SECONDS, "the other rank waits for ever"
            time.sleep(0.1)
    finally:
        if number == signal.SIGSTOP:  # the launcher waits 30 s for a rank that cannot hear it
            victim.send_signal(signal.SIGKILL)
    output, _ = process.communicate(timeout=LEAVING_SECONDS)
    seconds = status.written_at - lost_at
    assert seconds < HEARTBEAT_SECONDS + JUDGING_SECONDS
    assert process.returncode != 0 and not run.processes()
    assert status.state == "failed" and "rank 1 (" in status.cause, status
    assert "error: rank 1 (" in output and re.search(said, output), output
    assert "its stacks:" in (run.output_dir / "stacks" / "rank-0.txt").read_text() and "its stacks:" not in output
    observed(
        f"{number.name}: named {seconds:.0f} s after it, at a heartbeat_timeout_seconds of {HEARTBEAT_SECONDS}; the "
        f"launcher returned {process.returncode} and no process is left",
        lost="the steps since the last checkpoint, which are taken again",
    )
