from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

from tests.support import fork_server
from trainer.distributed import launcher

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
