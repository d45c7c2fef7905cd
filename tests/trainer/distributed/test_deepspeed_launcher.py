from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from tests.support import fork_server

PROGRAM = """
import sys, time
from trainer.distributed import deepspeed_launcher as launcher

def main():
    print(launcher.runner.subprocess.Popen(["sleep", "600"]).pid, flush=True)
    time.sleep(600)

launcher.runner.main = main
launcher.main()
"""


@pytest.mark.long
@pytest.mark.spawn
def test_what_the_launcher_starts_ends_with_it_even_by_sigkill(tmp_path):
    """As pdsh, which deepspeed's launcher starts by the name `subprocess.Popen` of its module."""
    launcher = fork_server.start(["-c", PROGRAM], tmp_path, os.environ | fork_server.FIXED)
    assert launcher.stdout is not None
    child = psutil.Process(int(launcher.stdout.readline()))
    assert child.name() == "sleep"
    launcher.kill()
    launcher.wait()
    _, alive = psutil.wait_procs([child], timeout=30)
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE], "a zombie waits for its parent alone"


FAKE_PDSH = """#!/bin/bash
echo "node-a: [launch.py] starts"
{middle}
echo "pdsh@here: node-c: ssh exited with exit code 255" >&2
trap '' INT
sleep 5
echo "node-a: all is done"
exit 3
"""
LAUNCH = """
import sys
from trainer.distributed import deepspeed_launcher as launcher

def main():
    result = launcher.runner.subprocess.Popen(["pdsh", "-S"], env=None)
    result.wait()
    if result.returncode > 0:
        sys.exit(result.returncode)

launcher.runner.main = main
launcher.main()
"""


@pytest.mark.long
@pytest.mark.spawn
@pytest.mark.parametrize("was_reached", [False, True])
def test_a_host_that_ssh_never_reached_ends_the_launch_and_one_that_was_lost_later_does_not(was_reached, tmp_path):
    """The ranks end a run that loses a host later, and say which rank it was."""
    (tmp_path / "pdsh").write_text(FAKE_PDSH.format(middle='echo "node-c: step 1"; sleep 0.5' if was_reached else ""))
    (tmp_path / "pdsh").chmod(0o755)
    env = os.environ | fork_server.FIXED | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = fork_server.run(["-c", LAUNCH], tmp_path, env, timeout=200)
    assert "node-a: [launch.py] starts\n" in done.stdout and "pdsh@here: node-c: ssh exited" in done.stderr
    assert ("node-a: all is done" in done.stdout) is was_reached
    assert done.returncode == (3 if was_reached else 76), done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: host node-c is not reachable by ssh") is not was_reached, done.stderr


def test_the_launcher_of_this_release_starts_pdsh_by_that_name():
    from deepspeed.launcher import runner

    source = Path(runner.__file__).read_text()
    assert "result = subprocess.Popen(cmd, env=env)" in source
