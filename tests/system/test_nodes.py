"""Two hosts over ssh: one curve on one node or two, a link that is cut, and launchers that are killed.

`tests/support/two_nodes.py` makes the hosts. They share the file system, as nodes of a cluster share `output_dir`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.free_ports import free_port
from tests.support.two_nodes import TwoNodes, missing, two_nodes
from tests.system.conftest import PRETRAIN, REPOSITORY, Training
from trainer.tracking.status import HISTORY_NAME, read_history, read_status

pytestmark = [pytest.mark.slow, pytest.mark.launcher, pytest.mark.spawn]

NUM_STEPS = 120
SETTINGS = (
    f"training.max_steps={NUM_STEPS}",
    "checkpoint.every_steps=20",
    "evaluation.every_steps=120",
    "distributed.timeout_seconds=40",
    "training.deterministic=true",
)
HEARTBEAT_SECONDS = 6
IMPATIENT = f"health.heartbeat_timeout_seconds={HEARTBEAT_SECONDS}"
LEAVING_SECONDS = 90
"""From a verdict to the end of both launch.py and of the launcher, on a busy machine; ssh gives up after 20 s."""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    if (lacking := missing()) is not None:
        pytest.skip(lacking)
    with two_nodes(tmp_path_factory.mktemp("nodes")) as made:
        yield made


@pytest.fixture(scope="module")
def one_node_losses(training) -> list[tuple[int, float]]:
    """The curve of the same configuration on two ranks of one node."""
    alone = training(*SETTINGS)
    alone.run(2)
    return losses(alone)


def environment(run: Training, nodes: TwoNodes) -> dict[str, str]:
    """The variables that the ranks of both hosts need; written where the launcher looks for them."""
    (run.folder / "hosts").write_text("".join(f"{node.name} slots=1\n" for node in nodes.nodes))
    forwarded = {
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "eth0",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": str(run.folder / "extensions"),
        "XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"],
    }
    (run.folder / ".deepspeed_env").write_text("".join(f"{name}={value}\n" for name, value in forwarded.items()))
    given = {"HOME": str(run.folder), "PYTHONPATH": str(REPOSITORY), "PDSH_SSH_ARGS_APPEND": nodes.ssh_options}
    return os.environ | forwarded | given


def start(run: Training, nodes: TwoNodes, *more: str) -> subprocess.Popen[str]:
    """The deepspeed launcher on the first host, a rank on each; what they say goes into files of the run's folder."""
    words = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", "hosts", "--no_ssh_check"]
    words += ["--enable_each_rank_log", "logs", "--master_addr", nodes.nodes[0].address]
    words += ["--master_port", str(free_port()), PRETRAIN, *run.arguments(), *more]
    return start_on_first(run, nodes, words, environment(run, nodes))


def start_on_first(run: Training, nodes: TwoNodes, words: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    with open(run.folder / "output.log", "a") as log:
        command = nodes.nodes[0].command(words, run.folder)
        return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, text=True)


def output_of(run: Training) -> str:
    """What launcher and ranks said."""
    return "".join(path.read_text() for path in (run.folder / "output.log", *sorted(run.folder.glob("logs/*.log"))))


def said_by(run: Training, rank: int) -> str:
    return "".join(path.read_text() for path in sorted(run.folder.glob(f"logs/*_rank{rank}.log")))


def finish(run: Training, nodes: TwoNodes, *more: str) -> None:
    process = start(run, nodes, *more)
    assert process.wait(timeout=400) == 0, output_of(run)


def losses(run: Training) -> list[tuple[int, float]]:
    """The points of the one MLflow run."""
    from mlflow import MlflowClient

    client = MlflowClient(run.tracking_uri)
    (experiment,) = [found for found in client.search_experiments() if found.name == "clozeworks"]
    (mlflow_run,) = client.search_runs([experiment.experiment_id])
    points = client.get_metric_history(mlflow_run.info.run_id, "train/loss")
    return sorted((point.step, point.value) for point in points)


def of_node(run: Training, nodes: TwoNodes, number: int) -> list[psutil.Process]:
    """launch.py, ranks and workers of a host, and what of the launcher runs there."""
    mark = f"output_dir={run.output_dir}"
    found = [each for each in psutil.process_iter(["cmdline"]) if mark in " ".join(each.info["cmdline"] or [])]
    return [each for each in found if nodes.nodes[number].holds(each.pid)]


def wait_for_step(run: Training, process: subprocess.Popen[str], step: int) -> None:
    deadline = time.monotonic() + 240
    while run.last_logged_step() < step:
        assert process.poll() is None, output_of(run)
        assert time.monotonic() < deadline, output_of(run)
        time.sleep(0.01)


def wait_until_all_left(run: Training, nodes: TwoNodes, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while left := [each for number in (0, 1) for each in of_node(run, nodes, number)]:
        assert time.monotonic() < deadline, [each.cmdline() for each in left if each.is_running()]
        time.sleep(0.1)


def test_two_nodes_give_the_curve_of_one(training, nodes, one_node_losses):
    run = training(*SETTINGS)
    finish(run, nodes)
    assert losses(run) == one_node_losses and len(one_node_losses) == NUM_STEPS
    assert '"host": "node-a"' in (run.output_dir / HISTORY_NAME).read_text() and said_by(run, 1) is not None


@pytest.mark.fault(
    row="31",
    fault="the network between two hosts is cut for good in the middle of a step",
    required="both sides end within the timeout and name the rank that is lost; the same command then resumes",
)
def test_row_31_a_link_cut_for_good_ends_both_sides_and_the_same_command_goes_on(
    training, nodes, one_node_losses, observed
):
    run = training(*SETTINGS, IMPATIENT)
    process = start(run, nodes)
    wait_for_step(run, process, 50)
    nodes.cut()
    cut_at = time.time()  # as status.json tells the time
    try:
        wait_until_all_left(run, nodes, HEARTBEAT_SECONDS + LEAVING_SECONDS)
        assert process.wait(timeout=60) != 0
    finally:
        nodes.reconnect()
    status = read_status(run.output_dir)
    assert status.state == "failed" and "rank 1 (node-b, process " in status.cause, status
    seconds = status.written_at - cut_at
    for rank, other in ((0, "rank 1 (node-b, process "), (1, "rank 0 (node-a, process ")):
        said = said_by(run, rank)
        assert f"error: {other}" in said.splitlines()[-1] and "frame #" not in said, said
        assert f"rank {rank}, step" in (run.output_dir / "stacks" / f"rank-{rank}.txt").read_text()
    finish(run, nodes, IMPATIENT)
    assert "resuming after step 40" in output_of(run)
    assert losses(run) == one_node_losses
    observed(
        f"cut for good: named {seconds:.0f} s after it, at a heartbeat_timeout_seconds of {HEARTBEAT_SECONDS}; both "
        "sides end, and the same command goes on from step 40 with the same losses",
        lost="the steps since the last checkpoint, which are taken again",
    )


@pytest.mark.fault(
    row="31",
    fault="the network between two hosts is away for ten seconds",
    required="the run goes on, or ends cleanly and the same command resumes, whichever the timeouts say",
)
@pytest.mark.parametrize("heartbeat", [60, HEARTBEAT_SECONDS], ids=["patient", "impatient"])
def test_row_31_a_link_that_is_away_for_ten_seconds(heartbeat, training, nodes, one_node_losses):
    run = training(*SETTINGS, f"health.heartbeat_timeout_seconds={heartbeat}")
    process = start(run, nodes)
    wait_for_step(run, process, 50)
    nodes.cut()
    time.sleep(10)
    nodes.reconnect()
    returned = process.wait(timeout=300)
    wait_until_all_left(run, nodes, LEAVING_SECONDS)
    starts = [event for event in read_history(run.output_dir) if event.event == "started"]
    if heartbeat == 60:
        assert returned == 0 and len(starts) == 1, output_of(run)
    else:
        assert returned != 0 and read_status(run.output_dir).state == "failed", output_of(run)
        finish(run, nodes)
    assert losses(run) == one_node_losses


def check_that_all_saved_and_left(run, nodes, process):
    """After their launcher is gone: one checkpoint, of the step that status.json tells."""
    wait_until_all_left(run, nodes, LEAVING_SECONDS)
    process.wait(timeout=120)
    status = read_status(run.output_dir)
    assert status.state == "stopped", (status, output_of(run))
    (saved,) = (run.output_dir / "checkpoints").iterdir()
    assert saved.name == f"step-{status.step:08d}"


@pytest.mark.fault(
    row="28b",
    fault="the launcher of a run on two hosts: told to end, killed; launch.py of one host killed",
    required="no rank stays on either host; saved, or status.json names the rank that was lost",
)
@pytest.mark.parametrize(
    ("module", "host", "number"),
    [
        ("deepspeed.launcher.runner", 0, signal.SIGTERM),
        ("deepspeed.launcher.runner", 0, signal.SIGKILL),
        ("deepspeed.launcher.launch", 1, signal.SIGKILL),
    ],
    ids=["launcher told to end", "launcher killed", "launch.py of the second host killed"],
)
def test_row_28b_no_rank_outlives_its_launcher(module, host, number, training, nodes):
    run = training("training.max_steps=100000", "checkpoint.every_steps=50000", "evaluation.every_steps=50000")
    process = start(run, nodes)
    wait_for_step(run, process, 10)
    there = of_node(run, nodes, host)
    (victim,) = [each for each in there if module in each.cmdline() and Path(each.cmdline()[0]).name.startswith("py")]
    victim.send_signal(number)
    check_that_all_saved_and_left(run, nodes, process)


@pytest.mark.fault(
    row="28b",
    fault="the launcher is killed on a host without ranks, as on a login node; the ranks are on one other host",
    required="they save and leave, and nothing of the launcher stays",
)
def test_row_28b_the_ranks_notice_that_the_launcher_on_a_login_node_is_killed(training, nodes):
    run = training("training.max_steps=100000", "checkpoint.every_steps=50000", "evaluation.every_steps=50000")
    env = environment(run, nodes)
    (run.folder / ".deepspeed_env").unlink()
    (run.folder / "hosts").write_text("node-b slots=2\n")
    words = [sys.executable, str(REPOSITORY / "launch" / "nodes.py"), "--hostfile", "hosts", "--interface", "eth0"]
    words += ["--master-addr", nodes.nodes[1].address, "--master-port", str(free_port()), "--", *run.arguments()]
    process = start_on_first(run, nodes, words, env)
    wait_for_step(run, process, 10)
    there = of_node(run, nodes, 0)
    assert not [each for each in there if PRETRAIN in each.cmdline()[1:2]], "no rank is here"
    (victim,) = [each for each in there if "trainer.distributed.launcher" in each.cmdline()[:3]]
    victim.kill()
    check_that_all_saved_and_left(run, nodes, process)


@pytest.mark.fault(
    row="52",
    fault="a host of the hostfile that ssh does not reach",
    required="ssh names it, the ranks of the other hosts name its rank and leave, the launch fails",
)
def test_row_52_a_host_that_ssh_does_not_reach_ends_the_launch(training, nodes):
    run = training("training.max_steps=100000", "checkpoint.every_steps=50000", "evaluation.every_steps=50000")
    env = environment(run, nodes)
    (run.folder / ".deepspeed_env").unlink()
    (run.folder / "hosts").write_text("node-a slots=1\nnode-b slots=1\nnode-c slots=1\n")
    words = [sys.executable, str(REPOSITORY / "launch" / "nodes.py"), "--hostfile", "hosts", "--interface", "eth0"]
    words += ["--master-addr", nodes.nodes[0].address, "--master-port", str(free_port()), "--", *run.arguments()]
    process = start_on_first(run, nodes, [*words, "distributed.meeting_timeout_seconds=20"], env)
    assert process.wait(timeout=200) == 76, output_of(run)
    assert "rank 2 of 3 did not join within distributed.meeting_timeout_seconds=20" in output_of(run)
    assert "node-c: ssh exited with exit code 255" in output_of(run)
    wait_until_all_left(run, nodes, LEAVING_SECONDS)
    assert not run.output_dir.exists()


@pytest.mark.fault(
    row="47b",
    fault="a password in the environment of a plain `deepspeed --hostfile` on two hosts, which shows it to `ps`",
    required="refused on both hosts before anything is read, naming the variable and not its value",
)
def test_row_47b_a_plain_start_that_has_shown_a_password_is_refused(training, nodes):
    run = training("training.max_steps=20")
    env = environment(run, nodes) | {"MLFLOW_TRACKING_PASSWORD": "correct-horse-battery"}
    words = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", "hosts", "--no_ssh_check"]
    words += ["--log_level", "warning", "--master_addr", nodes.nodes[0].address]
    words += ["--master_port", str(free_port()), PRETRAIN, *run.arguments()]
    process = start_on_first(run, nodes, words, env)
    assert process.wait(timeout=200) != 0
    said = output_of(run)
    assert "error: the value of MLFLOW_TRACKING_PASSWORD appears in the arguments of process" in said, said
    assert "replace the secret" in said and "clozeworks nodes" in said and "[secret-in-arguments]" in said
    refusals = [line for line in said.splitlines() if "error: the value of" in line]
    assert refusals and not any("horse" in line for line in refusals)
    assert not run.output_dir.exists()


@pytest.mark.fault(
    row="47b",
    fault="a password in the environment of a start on two hosts",
    required="in the arguments of no process on any host, from the first second to the last",
)
def test_row_47b_no_secret_in_any_process_and_every_argument_as_it_is(training, nodes):
    """launch/nodes.py, with an experiment's name that every shell between would read otherwise (row 48)."""
    name = "it's $(touch broken) `id` 100%h; a|b"
    run = training("training.max_steps=20", "schedule.warmup_steps=1", f"tracking.experiment={name}")
    secret = "correct-horse-battery"
    env = environment(run, nodes) | {"MLFLOW_TRACKING_PASSWORD": secret, "AWS_SECRET_ACCESS_KEY": secret}
    (run.folder / ".deepspeed_env").unlink()
    words = [sys.executable, str(REPOSITORY / "launch" / "nodes.py"), "--hostfile", "hosts", "--interface", "eth0"]
    words += ["--master-addr", nodes.nodes[0].address, "--master-port", str(free_port()), "--", *run.arguments()]
    process = start_on_first(run, nodes, words, env)
    seen: set[str] = set()
    while process.poll() is None:
        for each in psutil.process_iter(["cmdline"]):
            seen.update(each.info["cmdline"] or [])
        time.sleep(0.05)
    assert process.returncode == 0, output_of(run)
    assert not [word for word in seen if secret in word] and any("deepspeed.launcher.launch" in word for word in seen)
    assert "would show their values: AWS_SECRET_ACCESS_KEY, MLFLOW_TRACKING_PASSWORD" in output_of(run)
    from mlflow import MlflowClient

    assert name in [found.name for found in MlflowClient(run.tracking_uri).search_experiments()]
    assert not list(run.folder.rglob("broken"))


def test_the_doctor_looks_at_both_hosts(training, nodes):
    run = training()
    env = environment(run, nodes) | {"AWS_PROFILE": "lab", "MLFLOW_TRACKING_PASSWORD": "correct-horse-battery"}
    words = [sys.executable, str(REPOSITORY / "launch" / "doctor.py"), "--hostfile", "hosts", *run.arguments()]

    def examine(*more: str, **changed: str) -> subprocess.CompletedProcess[str]:
        command = nodes.nodes[0].command([*words, *more], run.folder)
        return subprocess.run(command, env=env | changed, capture_output=True, text=True, timeout=300)

    done = examine(AWS_PROFILE="")
    lines = done.stdout
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"ok    host +node-a: same versions, the same folders, clock", lines), lines
    assert re.search(r"ok    host +node-b: same versions, the same folders, clock", lines), lines
    assert re.search(
        r"ok    collective +2 hosts, 2 ranks over gloo: all-reduce of 64 MiB in [\d.]+ s, [\d.]+ GB/s", lines
    )
    assert re.search(r"fail  secrets +MLFLOW_TRACKING_PASSWORD would be visible on the command lines", lines), lines
    assert re.search(r"ok    ssh +detects an unreachable host \(ServerAliveInterval 5 s\)", lines), lines
    assert "horse" not in lines
    del env["MLFLOW_TRACKING_PASSWORD"]
    (run.folder / ".deepspeed_env").write_text("# comment\nGLOO_SOCKET_IFNAME=eth0\n")
    (run.folder / "hosts").write_text("node-a slots=1\nnode-c slots=1\n")
    lines = examine("--master-addr", nodes.nodes[0].address).stdout
    assert re.search(r"fail  host +node-c: .*; 'ssh node-c ", lines), lines
    assert re.search(r"fail  forwarding +\S*\.deepspeed_env, line 1: '# comment' is not NAME=VALUE", lines), lines
    assert re.search(r"warn  forwarding +.*AWS_PROFILE, .*set here, but not in \.deepspeed_env", lines), lines
    assert re.search(r"warn  collective +skipped because a host check failed", lines), lines


@pytest.mark.parametrize("given", [None, "lo"])
def test_gloo_uses_the_interface_of_the_route_where_names_lead_to_the_loopback(given, nodes):
    """As with Debian's /etc/hosts, in which a host's own name is 127.0.1.1; what the user sets is left as it is."""
    hosts = nodes.folder / "hosts"
    before = hosts.read_text()
    base = {"PYTHONPATH": str(REPOSITORY), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    base |= {"MASTER_ADDR": nodes.nodes[0].address, "MASTER_PORT": str(free_port()), "LOCAL_RANK": "0"}
    base |= {} if given is None else {"GLOO_SOCKET_IFNAME": given}
    words = [sys.executable, "-W", "ignore", str(REPOSITORY / "tests/trainer/distributed/toy_ranks.py"), "collectives"]
    try:
        hosts.write_text("127.0.0.1 localhost\n127.0.1.1 node-a node-b\n")
        ranks = [
            subprocess.Popen(
                node.command(words, nodes.folder),
                env=os.environ | base | {"RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank, node in enumerate(nodes.nodes)
        ]
        said = [rank.communicate(timeout=200)[0] for rank in ranks]
    finally:
        hosts.write_text(before)
    statuses = [rank.returncode for rank in ranks]
    assert statuses == [75, 75] if given is None else 75 not in statuses, said
