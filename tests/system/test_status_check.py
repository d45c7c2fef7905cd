"""`clozeworks status --check` judges real runs: whatever becomes of a run, a probe is told."""

from __future__ import annotations

import signal
import time

import pytest

from launch import status
from tests.support import plain_ranks

pytestmark = [pytest.mark.spawn, pytest.mark.long]
LONG = ("training.max_steps=2000", "checkpoint.every_steps=500", "evaluation.every_steps=2000")


def running(training, *more, **env):
    run = training(*LONG, *more, **env)
    ranks = plain_ranks.start(run, 1)
    plain_ranks.wait_until(lambda: run.last_logged_step() > 3, ranks)
    return run, ranks


def test_a_run_is_healthy_until_it_is_killed(training):
    run, ranks = running(training)
    found = status.verdict(run.output_dir)
    assert found.state == "healthy" and "tokens/s" in found.reason
    plain_ranks.send(signal.SIGKILL, *ranks)
    plain_ranks.finish(ranks)
    found = status.verdict(run.output_dir)
    assert found.state == "dead" and "does not exist anymore" in found.reason


def test_a_stop_is_told_with_its_cause(training):
    run, ranks = running(training)
    plain_ranks.send(signal.SIGTERM, *ranks)
    assert plain_ranks.finish(ranks) == [75]
    found = status.verdict(run.output_dir)
    assert found.state == "stopped" and "SIGTERM" in found.reason


def test_a_process_that_is_halted_is_silent_and_healthy_again_when_it_goes_on(training, monkeypatch):
    run, ranks = running(training)
    monkeypatch.setattr(status, "DEAD_AFTER_SECONDS", 3.0)
    plain_ranks.send(signal.SIGSTOP, *ranks)
    time.sleep(4)
    assert status.verdict(run.output_dir).state == "silent"
    plain_ranks.send(signal.SIGCONT, *ranks)
    step = run.last_logged_step()
    plain_ranks.wait_until(lambda: run.last_logged_step() > step, ranks)
    plain_ranks.wait_until(lambda: status.verdict(run.output_dir).state == "healthy", ranks, 30)
    plain_ranks.send(signal.SIGKILL, *ranks)
    plain_ranks.finish(ranks)


def test_a_server_that_is_lost_leaves_a_run_healthy(training):
    """Metrics wait on disk; no alert wakes anybody for it."""
    run, ranks = running(training, "tracking.uri=http://127.0.0.1:9")
    assert status.verdict(run.output_dir).state == "healthy"
    plain_ranks.send(signal.SIGKILL, *ranks)
    plain_ranks.finish(ranks)


def test_a_run_that_fails_is_told_with_its_cause(training):
    diverges = ("optimizer.learning_rate=1e30", "training.gradient_clipping=0", "health.max_nonfinite_steps=2")
    run = training(*LONG, *diverges)
    ranks = plain_ranks.start(run, 1)
    assert plain_ranks.finish(ranks) == [1]
    found = status.verdict(run.output_dir)
    assert found.state == "failed" and "not finite" in found.reason
