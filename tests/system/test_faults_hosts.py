"""Rows 52 and 60: hosts that are not found, ranks that die while the groups are made, and runs whose processes died."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.plain_ranks import finish, send, start, wait_until
from tests.system.conftest import REPOSITORY
from trainer.distributed.watchdog import LOST_RANK_EXIT_STATUS
from trainer.tracking.status import read_status

pytestmark = pytest.mark.spawn

ENDLESS = ("training.max_steps=500000", "checkpoint.every_steps=500000", "evaluation.every_steps=500000")
SECONDS = 6
IMPATIENT = (
    f"distributed.connect_timeout_seconds={SECONDS}",
    f"distributed.meeting_timeout_seconds={SECONDS}",
    f"health.heartbeat_timeout_seconds={SECONDS}",
)


@pytest.mark.fault(
    row="52",
    fault="a rank is killed while the ranks meet and their groups are made",
    required="the other one leaves with 76, one paragraph and no traceback, whatever it was waiting for",
)
@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 0.2, 0.5, 1.0, 2.0])
def test_row_52_a_rank_that_dies_while_the_groups_are_made_is_told_in_a_paragraph(seconds, training):
    run = training(*ENDLESS, *IMPATIENT)
    first, second = start(run, 2)
    process = psutil.Process(first.process.pid)
    wait_until(lambda: any(each.status == psutil.CONN_LISTEN for each in process.net_connections()), [first])
    time.sleep(seconds)
    second.process.kill()
    assert finish([first], timeout=200) == [LOST_RANK_EXIT_STATUS], first.output
    last = first.output.splitlines()[-1]
    # What the first rank was waiting for when the other one died is not certain; tests/trainer/distributed has each.
    assert last.startswith("error: ") and "rerun the same command" in last.partition(" Fix: ")[2], last
    assert last.endswith(("[rank-lost]", "[rank-missing]", "[process-group-not-connected]")), last
    assert "Traceback" not in first.output and "frame #" not in first.output, first.output


def state_shown(output_dir: Path) -> str:
    """The first line of launch/status.py."""
    command = [sys.executable, str(REPOSITORY / "launch" / "status.py"), str(output_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[0]


@pytest.mark.fault(
    row="60",
    fault="SIGKILL of every rank",
    required="`clozeworks status` reports the run as dead, and as running before",
)
def test_row_60_a_run_whose_ranks_were_all_killed_is_reported_as_dead(training):
    run = training(*ENDLESS)
    ranks = start(run, 2)
    wait_until(lambda: run.last_logged_step() >= 3, ranks)
    wait_until(lambda: (status := read_status(run.output_dir)) and status.pid == ranks[0].process.pid, ranks)
    assert state_shown(run.output_dir).startswith("state             running, last update ")
    send(signal.SIGKILL, *ranks)
    finish(ranks)
    status = read_status(run.output_dir)
    assert status is not None and status.state == "running", "nobody could write the end"
    shown = state_shown(run.output_dir)
    assert f"dead (process {ranks[0].process.pid} on host " in shown and "is gone and did not record why" in shown


@pytest.mark.fault(
    row="60",
    fault="a second signal while the other rank is stopped, so that no checkpoint can be saved",
    required="the rank leaves at once and notes its end, which `clozeworks status` reports",
)
@pytest.mark.slow
def test_row_60_a_second_signal_notes_the_end(training):
    run = training(*ENDLESS, "health.heartbeat_timeout_seconds=600")
    ranks = start(run, 2)
    wait_until(lambda: run.last_logged_step() >= 3, ranks)
    ranks[1].process.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 120
    while ranks[0].process.poll() is None:  # on a busy machine the first may be heard late
        assert time.monotonic() < deadline
        send(signal.SIGTERM, ranks[0])
        time.sleep(2.5)
    ranks[1].process.kill()
    assert finish(ranks)[0] == 128 + signal.SIGTERM, ranks[0].output
    cause = "a second signal, SIGTERM"
    assert cause in ranks[0].output.splitlines()[-1]
    assert cause in state_shown(run.output_dir) and "state             failed (rank 0 (" in state_shown(run.output_dir)
