from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from tests.support import fork_server
from trainer.distributed import launcher
from trainer.distributed.launcher import ancestors, came_by_ssh, launcher_levels

VARIABLES = ("TORCHELASTIC_RUN_ID", "CROSS_SIZE")


@pytest.mark.parametrize(
    ("environment", "levels"),
    [
        ({}, 0),
        ({"TORCHELASTIC_RUN_ID": "none"}, 1),
        ({"CROSS_SIZE": "1"}, 2),
        ({"CROSS_SIZE": "3"}, 1),
    ],
    ids=["none", "torchrun", "deepspeed on one node", "deepspeed on several"],
)
def test_the_launcher_is_recognized_by_its_environment(environment, levels, monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launcher_levels() == levels


@pytest.mark.parametrize(
    ("words", "by_ssh"),
    [
        (["bash", "-c", "export A=b; cd /x; /v/bin/python -u -m deepspeed.launcher.launch --node_rank=0 a.py"], True),
        (["sshd: me@notty"], True),
        (["/v/bin/python", "/v/bin/deepspeed", "--num_gpus", "2", "launch/pretrain.py"], False),
        (["/v/bin/python", "-m", "deepspeed.launcher.runner", "launch/pretrain.py"], False),
        (["-bash"], False),
        ([], False),
    ],
)
def test_one_host_reached_by_ssh_is_distinguished_from_a_launcher_on_this_one(words, by_ssh):
    assert came_by_ssh(words) is by_ssh


def test_the_ancestors_are_parent_and_grandparent():
    code = "import os; from trainer.distributed.launcher import ancestors; print(*ancestors(os.getpid()))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    above = [int(pid) for pid in child.stdout.split()]
    assert above[:2] == [os.getpid(), os.getppid()] and 0 not in above
    assert list(ancestors(above[0])) == above[1:]


@pytest.mark.parametrize(
    ("num_hosts", "watched"), [("2", [(os.getpid(), 7), (70, 7)]), ("1", [(os.getpid(), 7), (7, 8)])]
)
def test_on_several_nodes_the_way_up_to_ssh_is_watched_too(num_hosts, watched, monkeypatch):
    monkeypatch.setenv("CROSS_SIZE", num_hosts)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    seen = []
    monkeypatch.setattr(launcher, "_look", lambda links, on_loss: seen.extend(links))
    monkeypatch.setattr(launcher, "ancestors", lambda process: iter([7, 8]))
    monkeypatch.setattr(launcher, "remote_links", lambda launch: [(70, launch)])
    launcher.watch_launcher(lambda: None)
    for thread in threading.enumerate():
        if thread.name == "launcher-watch":
            thread.join(60)
    assert seen == watched


@pytest.mark.spawn
def test_the_loss_of_the_upper_of_two_launchers_is_noticed():
    """Three processes, each the parent of the next: the lowest watches, the uppermost is killed."""
    watcher = (
        "import threading; from trainer.distributed.launcher import watch_launcher; lost = threading.Event(); "
        "watch_launcher(lost.set); print('watching', flush=True); print(lost.wait(60), flush=True)"
    )
    middle = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {watcher!r}])"
    upper = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {middle!r}]).wait()"
    process = subprocess.Popen(
        [sys.executable, "-c", upper], env=os.environ | {"CROSS_SIZE": "1"}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "watching\n"
    process.kill()
    assert process.stdout.readline() == "True\n"
    process.wait()


PROGRAM = """
import sys, time
from deepspeed.launcher import runner
from trainer.distributed import launcher

def main():
    print(runner.subprocess.Popen(["sleep", "600"]).pid, flush=True)
    time.sleep(600)

runner.main = main
launcher.main()
"""


@pytest.mark.long
@pytest.mark.spawn
def test_ranks_end_with_their_launcher_even_by_sigkill(tmp_path):
    """As pdsh, which deepspeed's launcher starts by the name `subprocess.Popen` of its module."""
    launcher = fork_server.start(["-c", PROGRAM], tmp_path, os.environ | fork_server.FIXED)
    assert launcher.stdout is not None
    child = psutil.Process(int(launcher.stdout.readline()))
    assert child.name() == "sleep"
    launcher.kill()
    launcher.wait()
    _, alive = psutil.wait_procs([child], timeout=30)
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE], "a zombie waits for its parent alone"


@pytest.mark.parametrize(("of_hosts", "status"), [(255, 76), (76, 76), (75, 75), (1, 1)])
def test_the_launch_ends_as_after_a_lost_rank_where_ssh_fails(of_hosts: int, status: int, monkeypatch) -> None:
    from deepspeed.launcher import runner

    monkeypatch.setattr(runner, "subprocess", runner.subprocess)  # which `main` replaces
    monkeypatch.setattr(runner, "main", lambda: sys.exit(of_hosts))
    with pytest.raises(SystemExit) as ended:
        launcher.main()
    assert ended.value.code == status


def test_the_launcher_of_this_release_starts_pdsh_by_that_name():
    from deepspeed.launcher import runner

    source = Path(runner.__file__).read_text()
    assert "result = subprocess.Popen(cmd, env=env)" in source
