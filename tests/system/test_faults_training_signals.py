"""Rows 28 and 28b: ranks and launchers that are asked to stop, once and twice, and launchers that are killed."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from tests.support.free_ports import free_port
from tests.support.plain_ranks import finish, losses, newest_checkpoint, send, start, wait_until
from tests.system.conftest import PRETRAIN, Training
from trainer.distributed.stop_signal import REPEAT_SECONDS, STOPPED_EXIT_STATUS
from trainer.tracking.status import read_history, read_status

pytestmark = pytest.mark.spawn

ENDLESS = ("training.max_steps=500000", "checkpoint.every_steps=500000", "evaluation.every_steps=500000")
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@pytest.mark.fault(
    row="28",
    fault="SIGUSR1 to one rank of two, then SIGINT to both, then SIGTERM to both",
    required="both save after the same step and leave with 75; the same command goes on in the same MLflow run, "
    "no step twice",
)
def test_row_28_a_signal_to_any_rank_saves_on_all_and_the_same_command_goes_on_in_the_same_run(training, observed):
    stopped = training(*ENDLESS)
    steps, seconds = [], []
    first, second = (f"rank {number} ({socket.gethostname()}): " for number in (0, 1))
    for number, whom, cause in (
        (signal.SIGUSR1, slice(1, 2), f"{second}SIGUSR1"),
        (signal.SIGINT, slice(None), f"{first}SIGINT, {second}SIGINT"),
        (signal.SIGTERM, slice(None), f"{first}SIGTERM, {second}SIGTERM"),
    ):
        before = steps[-1] if steps else 0
        ranks = start(stopped, 2)
        wait_until(lambda before=before: stopped.last_logged_step() >= before + 3, ranks)
        send(number, *ranks[whom])
        sent_at = time.monotonic()
        statuses = finish(ranks)
        seconds.append(time.monotonic() - sent_at)
        output = "".join(rank.output for rank in ranks)
        assert statuses == [STOPPED_EXIT_STATUS] * 2, output
        status = read_status(stopped.output_dir)
        # One of two that are signalled may have taken the step before it hears of it.
        causes = (cause, *(f"{each}{number.name}" for each in (first, second) if whom == slice(None)))
        assert status is not None and status.state == "stopped" and status.cause in causes, status
        told = f"stopped by {status.cause}; checkpoint saved at step {status.step:,}; rerun the same command"
        assert [told in rank.output for rank in ranks] == [True, False], "one rank per host says so"
        assert newest_checkpoint(stopped).name == f"step-{status.step:08d}"
        if steps:
            assert f"resuming after step {steps[-1]:,}" in output
        steps.append(status.step)
    assert list(losses(stopped)) == list(range(1, steps[-1] + 1))
    assert_one_mlflow_run_with_each_step_once(stopped, steps[-1])
    observed(
        f"after SIGUSR1, SIGINT and SIGTERM both ranks save the same step ({', '.join(map(str, steps))}) and have left "
        f"with {STOPPED_EXIT_STATUS} within {max(seconds):.0f} s; one MLflow run, no step twice"
    )


def assert_one_mlflow_run_with_each_step_once(stopped: Training, last: int) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(stopped.tracking_uri)
    (experiment,) = [found for found in client.search_experiments() if found.name == "clozeworks"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "KILLED"
    points = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted(point.step for point in points) == list(range(1, last + 1))


@pytest.mark.fault(
    row="28",
    fault="a second signal while a save hangs",
    required="the process leaves at once with 128 + the signal's number",
)
@pytest.mark.parametrize("number", [SIGNALS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in SIGNALS[1:])])
def test_row_28_a_second_signal_leaves_at_once_though_the_disk_hangs(number, training, observed):
    hanging = training(*ENDLESS)
    (rank,) = start(hanging, 1, trouble={"hang": {"rank": 0, "writing": "/checkpoints/"}})
    wait_until(lambda: hanging.last_logged_step() >= 3, [rank])
    send(number, rank)
    wait_until(lambda: (hanging.folder / "hanging").exists(), [rank])
    time.sleep(REPEAT_SECONDS + 0.5)  # from then on it is a second one; the status below is that of a second signal
    send(number, rank)
    sent_at = time.monotonic()
    assert finish([rank], timeout=120) == [128 + number]
    seconds = time.monotonic() - sent_at
    assert not list((hanging.output_dir / "checkpoints").glob("*/checkpoint.json"))
    status, cause = read_status(hanging.output_dir), f"rank 0 ({socket.gethostname()}): a second signal, {number.name}"
    assert status is not None and (status.state, status.cause) == ("failed", cause), status
    assert f"ended by {cause}; rerun the same command to resume" in rank.output.splitlines()[-1]
    observed(
        f"{number.name}: left with {128 + number} after {seconds:.1f} s, nothing half-saved counts",
        lost="the steps since the last checkpoint",
    )


@pytest.mark.fault(
    row="28",
    fault="SIGTERM to a rank whose peer died before they had met",
    required="it leaves with 75, and nothing is left behind",
)
@pytest.mark.slow
def test_row_28_a_rank_whose_peer_never_came_leaves_on_a_signal(training):
    waiting = training(*ENDLESS)
    first, second = start(waiting, 2)
    second.process.kill()
    process = psutil.Process(first.process.pid)
    wait_until(lambda: any(each.status == psutil.CONN_LISTEN for each in process.net_connections()), [first])
    time.sleep(1)  # outside Python, where no handler runs
    send(signal.SIGTERM, first)
    assert finish([first], timeout=30) == [STOPPED_EXIT_STATUS], first.output
    assert f"rank 0 ({socket.gethostname()}): SIGTERM before the first step" in first.output
    assert "Traceback" not in first.output
    assert not waiting.output_dir.exists()


@pytest.mark.fault(
    row="28",
    fault="SIGUSR1 to the ranks under torchrun, SIGTERM to itself",
    required="they save; torchrun's log has their own status",
)
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM], ids=["USR1 to the ranks", "TERM to torchrun"])
def test_row_28_ranks_under_torchrun_save_and_leave_with_their_status(number, training):
    stopped = training(*ENDLESS)
    process = start_torchrun(stopped)
    try:
        wait_for_steps(stopped, process, 3)
        if number == signal.SIGTERM:
            process.send_signal(number)
        else:
            for rank in children_of(process):
                rank.send_signal(number)
        output, _ = process.communicate(timeout=900)
    finally:
        stopped.kill()
    status = read_status(stopped.output_dir)
    assert status is not None and status.state == "stopped", output
    assert process.returncode != 0
    if number == signal.SIGUSR1:
        assert f"exitcode  : {STOPPED_EXIT_STATUS}" in output, output


@pytest.mark.fault(
    row="28b",
    fault="SIGTERM to the deepspeed launcher; SIGKILL to launch.py of the node, and to torchrun",
    required="the ranks notice that they are orphans, save and leave; status.json tells the truth, which a plain "
    "launcher's exit status does not: 143 or 137 where it is killed itself, and 0 of deepspeed's where its launch.py "
    "is",
)
@pytest.mark.launcher
@pytest.mark.parametrize(
    ("module", "num_ranks", "number", "returned"),
    [
        ("deepspeed.launcher.runner", 1, signal.SIGTERM, -signal.SIGTERM),
        pytest.param("deepspeed.launcher.runner", 2, signal.SIGTERM, -signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("deepspeed.launcher.launch", 2, signal.SIGKILL, 0, marks=pytest.mark.slow),
        pytest.param("torch.distributed.run", 2, signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.slow),
    ],
    ids=["the launcher of one rank gets SIGTERM", "the launcher gets SIGTERM", "launch.py is killed"]
    + ["torchrun is killed"],
)
def test_row_28b_ranks_whose_launcher_is_gone_save_and_leave(module, num_ranks, number, returned, training, observed):
    orphaned = training(*ENDLESS)
    process = orphaned.start(num_ranks) if module.startswith("deepspeed") else start_torchrun(orphaned)
    wait_for_steps(orphaned, process, 3)
    (launcher,) = [found for found in orphaned.processes() if module in found.cmdline()]
    launcher.send_signal(number)
    sent_at = time.monotonic()
    deadline = sent_at + 300
    while orphaned.processes():
        assert time.monotonic() < deadline, orphaned.processes()
        time.sleep(0.1)
    seconds = time.monotonic() - sent_at
    process.communicate(timeout=300)
    assert process.returncode == returned
    status = read_status(orphaned.output_dir)
    assert status is not None and status.state == "stopped", status
    assert "): its launcher was lost" in status.cause
    assert newest_checkpoint(orphaned).name == f"step-{status.step:08d}"
    assert [event.event for event in read_history(orphaned.output_dir)] == ["started", "saved", "ended"]
    observed(
        f"{number.name} to {module}: the ranks saved step {status.step} and had left after {seconds:.0f} s; the "
        f"launcher returned {returned if returned >= 0 else 128 - returned}, status.json says stopped"
    )


@pytest.mark.fault(
    row="28b",
    fault="SIGUSR1 to the ranks under the deepspeed launcher of one node",
    required="they save and leave, and the launcher returns their status",
)
@pytest.mark.slow
@pytest.mark.launcher
def test_row_28b_the_deepspeed_launcher_of_one_node_returns_the_status_of_its_ranks(training):
    stopped = training(*ENDLESS)
    process = stopped.start()
    wait_for_steps(stopped, process, 3)
    (launcher,) = [found for found in stopped.processes() if "deepspeed.launcher.launch" in found.cmdline()]
    for rank in launcher.children():
        rank.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == STOPPED_EXIT_STATUS, output
    status = read_status(stopped.output_dir)
    assert status is not None and status.state == "stopped", status


def start_torchrun(training: Training) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port"]
    return training._popen([*command, str(free_port()), PRETRAIN, *training.arguments()])


def wait_for_steps(training: Training, process: subprocess.Popen[str], steps: int) -> None:
    deadline = time.monotonic() + 900
    while training.last_logged_step() < steps:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the training did not come to the step in time"
        time.sleep(0.02)


def children_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    """The ranks that torchrun started, without the workers of their loaders."""
    return psutil.Process(launcher.pid).children()
