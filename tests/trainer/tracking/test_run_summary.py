from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.status import check
from trainer.tracking.run_summary import assess
from trainer.tracking.status import Status, read_status

REPOSITORY = Path(__file__).resolve().parents[3]
NOW = 100_000.0
RUNNING = Status(
    state="running",
    written_at=NOW - 30,
    heartbeat_at=NOW - 5,
    moved_at=NOW - 5,
    doing="step 6: micro-batch 1",
    step=5,
    max_steps=10,
    seconds_per_step=2.0,
    log_every_steps=5,
    host="node-a",
    pid=4711,
)


def word(
    is_alive: bool | None = True, is_suspended: bool = False, disk_is_full: bool = False, **changes: object
) -> str:
    status = RUNNING.model_copy(update=changes)
    return assess(status, NOW, is_alive, is_suspended, disk_is_full).state


@pytest.mark.parametrize(
    ("expected", "changes"),
    [
        ("healthy", {}),
        ("healthy", {"is_alive": None}),
        ("finished", {"state": "finished", "is_alive": False}),
        ("failed", {"state": "failed", "cause": "the loss diverged"}),
        ("stopped", {"state": "stopped", "cause": "SIGTERM"}),
        ("dead", {"is_alive": False}),
        ("dead", {"is_alive": None, "heartbeat_at": NOW - 121}),
        ("silent", {"heartbeat_at": NOW - 121}),
        ("healthy", {"heartbeat_at": NOW - 119}),
        ("stalled", {"is_suspended": True}),
        ("healthy", {"moved_at": NOW - 599, "written_at": NOW - 9000}),
        ("stalled", {"moved_at": NOW - 601}),
        ("healthy", {"moved_at": NOW - 601, "seconds_per_step": 61.0}),
        ("healthy", {"moved_at": NOW - 3500, "patience_seconds": 3600}),
        ("stalled", {"moved_at": None, "written_at": NOW - 701}),
        ("healthy", {"moved_at": None, "written_at": NOW - 699}),
        ("healthy", {"moved_at": None, "written_at": NOW - 1799, "seconds_per_step": None}),
        ("stalled", {"moved_at": None, "written_at": NOW - 1801, "seconds_per_step": None}),
    ],
)
def test_the_health_follows_from_state_heartbeat_and_progress(expected, changes):
    assert word(**changes) == expected


def test_a_full_disk_is_named_as_the_cause_of_a_missing_heartbeat():
    late = RUNNING.model_copy(update={"heartbeat_at": NOW - 300})
    assert "disk of output_dir is full" in assess(late, NOW, True, False, disk_is_full=True).reason
    assert "full" not in assess(late, NOW, True, False, disk_is_full=False).reason


def test_a_full_disk_is_named_where_the_end_of_a_run_could_not_be_recorded():
    health = assess(RUNNING, NOW, False, False, disk_is_full=True)
    assert health.state == "dead" and "disk of output_dir is full" in health.reason
    assert "full" not in assess(RUNNING, NOW, False, False, disk_is_full=False).reason


# The status of a run, whose end a SIGTERM asks for; its main thread begins an operation every 10 ms.
_RUN = """
import signal, sys, time
from types import SimpleNamespace
from pathlib import Path
from trainer.tracking.status import RunStatus

now = SimpleNamespace(marks=0, doing="step 1: fetching", patience_seconds=0)
status = RunStatus(Path(sys.argv[1]), print, lambda: now)

def stop(*_):
    status.end("stopped", "SIGTERM", 1)
    sys.exit(75)

signal.signal(signal.SIGTERM, stop)
values = {"step": 1, "max_steps": 9, "tokens_seen": 5, "skipped_steps": 0, "world_size": 1}
status.update(values | {"metrics": {"train/tokens_per_second": 1234.0}})
while True:
    now.marks += 1
    time.sleep(0.01)
"""


@pytest.fixture
def process(tmp_path):
    started = subprocess.Popen([sys.executable, "-c", _RUN, str(tmp_path)], cwd=REPOSITORY)
    deadline = time.monotonic() + 60
    while read_status(tmp_path) is None:
        assert started.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    yield started
    started.kill()
    started.wait()


def wait_for(tmp_path: Path, expected: str) -> str:
    """Wait until the health is the expected one, and return its reason."""
    deadline = time.monotonic() + 10
    while (health := check(tmp_path)).state != expected:
        assert time.monotonic() < deadline, health
        time.sleep(0.02)
    return health.reason


@pytest.mark.spawn
def test_signals_to_a_real_process_give_the_right_states(process, tmp_path):
    assert "step 1 of 9" in check(tmp_path).reason and "1,234 tokens/s" in wait_for(tmp_path, "healthy")
    process.send_signal(signal.SIGSTOP)
    assert "SIGSTOP" in wait_for(tmp_path, "stalled")
    process.send_signal(signal.SIGCONT)
    wait_for(tmp_path, "healthy")
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 75
    assert wait_for(tmp_path, "stopped") == "at step 1: SIGTERM; the same command resumes it"


@pytest.mark.spawn
def test_a_killed_process_is_dead_and_the_command_ends_with_1(process, tmp_path):
    command = [sys.executable, "-m", "launch", "status", "--check", str(tmp_path)]
    healthy = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, env=dict(os.environ))
    assert healthy.returncode == 0 and healthy.stdout.startswith("healthy: step 1 of 9 at "), healthy
    process.kill()
    process.wait()
    dead = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert dead.returncode == 1 and dead.stdout.startswith("dead: ") and dead.stdout.count("\n") == 1, dead
