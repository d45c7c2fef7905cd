"""A training that is asked to stop saves and goes on later; one that cannot save its end says so."""

from __future__ import annotations

import signal
import time

import pytest

from trainer.tracking.status import read_status

pytestmark = [pytest.mark.launcher, pytest.mark.spawn]
MANY_STEPS = ("training.max_steps=5000", "checkpoint.every_steps=5000", "evaluation.every_steps=5000")


@pytest.mark.fault(
    row="28",
    fault="SIGINT to the launcher and all ranks at once, as Ctrl-C in a terminal",
    required="a checkpoint, status.json says stopped; the same command goes on",
)
@pytest.mark.slow
def test_row_28_ctrl_c_in_a_terminal_saves_and_the_same_command_goes_on(training):
    stopped = training(*MANY_STEPS)
    process = stopped.start()
    while stopped.last_logged_step() < 3:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    stopped.kill(signal.SIGINT)  # launcher, ranks and workers alike; the launcher then tells the ranks again
    output, _ = process.communicate(timeout=300)

    status = read_status(stopped.output_dir)
    assert status is not None and status.state == "stopped", output
    (saved,) = (stopped.output_dir / "checkpoints").iterdir()
    assert saved.name == f"step-{status.step:08d}" and "checkpoint saved at step" in output
    assert not stopped.processes()

    assert f"resuming after step {status.step:,}" in resumed_output(stopped, status.step)


@pytest.mark.fault(
    row="27",
    fault="a file where the folder of checkpoints should be",
    required="the run fails with a clear error, and its status says so",
)
@pytest.mark.slow
def test_row_27_a_run_whose_end_cannot_be_saved_did_not_succeed(training):
    unsaved = training("training.max_steps=2", "schedule.warmup_steps=1")
    unsaved.output_dir.mkdir()
    (unsaved.output_dir / "checkpoints").write_text("a file where the folder should be")
    process = unsaved.start()
    output, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    assert "error: the run ends after step 2 and its last checkpoint was not saved" in output
    assert "Traceback" not in output
    status = read_status(unsaved.output_dir)
    assert status is not None and status.state == "failed"


def resumed_output(training, step: int) -> str:
    """What the same command prints until it has taken a step more, and is ended."""
    process = training.start()
    while training.last_logged_step() <= step:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    training.kill()
    return process.communicate(timeout=60)[0]
