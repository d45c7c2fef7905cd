"""What `clozeworks status --check` says of a real training run in trouble, and the log that the run keeps."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from launch.status import check
from tests.support.free_ports import free_port
from tests.support.plain_ranks import finish, send, start, wait_until
from trainer.distributed.stop_signal import STOPPED_EXIT_STATUS
from trainer.tracking import run_summary
from trainer.tracking.status import log_path, read_status

pytestmark = [pytest.mark.spawn, pytest.mark.long]

ENDLESS = ("training.max_steps=500000", "checkpoint.every_steps=500000", "evaluation.every_steps=500000")


def wait_for(output_dir: Path, word: str) -> str:
    """Wait until the health is this one, and return its reason."""
    deadline = time.monotonic() + 60
    while (answer := check(output_dir)).state != word:
        assert time.monotonic() < deadline, answer
        time.sleep(0.1)
    return answer.reason


def wait_for_step(run, rank) -> None:
    wait_until(lambda: (status := read_status(run.output_dir)) and status.pid == rank.process.pid, [rank])
    wait_until(lambda: run.last_logged_step() >= 3, [rank])


def test_signals_and_a_lost_mlflow_server(training):
    run = training(*ENDLESS, f"tracking.uri=http://127.0.0.1:{free_port()}")
    (rank,) = start(run, 1)
    wait_for_step(run, rank)
    assert "tokens/s" in wait_for(run.output_dir, "healthy"), "a run without its server trains on"
    send(signal.SIGSTOP, rank)
    wait_for(run.output_dir, "stalled")
    send(signal.SIGCONT, rank)
    wait_for(run.output_dir, "healthy")
    send(signal.SIGTERM, rank)
    assert finish([rank]) == [STOPPED_EXIT_STATUS], rank.output
    assert "SIGTERM" in wait_for(run.output_dir, "stopped")
    log = log_path(run.output_dir).read_text()
    assert " UTC start: rank 0, process " in log and "UTC step 1/500000" in log and "stopped by" in log
    (rank,) = start(run, 1)
    wait_until(lambda: (status := read_status(run.output_dir)) and status.pid == rank.process.pid, [rank])
    send(signal.SIGKILL, rank)
    finish([rank])
    wait_for(run.output_dir, "dead")
    assert log_path(run.output_dir).read_text().startswith(log), "each start adds to the file"


def test_an_error_that_ends_a_run_is_the_last_line_of_its_log(training):
    run = training(*ENDLESS, "health.max_nonfinite_steps=1", "optimizer.learning_rate=1e30", "schedule.warmup_steps=0")
    (rank,) = start(run, 1)
    assert finish([rank]) == [1], rank.output
    wait_for(run.output_dir, "failed")
    assert " warning: error: " in log_path(run.output_dir).read_text().splitlines()[-1]


def test_a_full_disk_makes_the_run_silent_and_does_not_end_it(training, tmp_path, monkeypatch):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a file system may not be mounted here")
    monkeypatch.setattr(run_summary, "DEAD_AFTER_SECONDS", 20.0)  # two of its heartbeats would be late
    run = training(*ENDLESS)
    (disk / "run").mkdir()
    run.output_dir.symlink_to(disk / "run")
    ranks = start(run, 1)
    try:
        wait_for_step(run, ranks[0])
        with open(disk / "filler", "wb", buffering=0) as filler:
            while filler.write(bytes(4096)) == 4096:
                pass
    except OSError:
        assert "full" in wait_for(run.output_dir, "silent")
        assert ranks[0].process.poll() is None
        (disk / "filler").unlink()
        wait_for(run.output_dir, "healthy")
    finally:
        send(signal.SIGKILL, *ranks)
        finish(ranks)
        subprocess.run(["umount", "-l", str(disk)], check=True)
