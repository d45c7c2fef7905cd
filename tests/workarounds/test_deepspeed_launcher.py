"""What the `deepspeed` launcher does that `trainer/distributed`, `trainer/preflight` and `launch/nodes.py` work around.

A test that fails here is good news: its message names the code that may be simpler now.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.support.free_ports import free_port
from tests.workarounds.new_process import SLEEPER, number_of_sleeper, still_runs

TWO_HOSTS = ["--hostfile", "hostfile", "--no_ssh_check", "--master_addr", "192.0.2.1", "train.py"]


def test_deepspeed_trains_on_one_node_where_the_hostfile_is_missing(tmp_path: Path) -> None:
    from deepspeed.launcher.runner import _parse_hostfile, fetch_hostfile

    remedy = "read_hostfile of preflight/hosts.py may leave it to the launcher"
    assert fetch_hostfile(str(tmp_path / "none")) is None, remedy
    assert _parse_hostfile(["node slots=2 slots=8\n"]) == {"node": 2}, remedy


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, Any]]]:
    """What `runner.main(TWO_HOSTS)` would start; it is not started."""
    from deepspeed.launcher import runner

    commands: list[tuple[list[str], dict[str, Any]]] = []

    def start(command: list[str], **options: Any) -> SimpleNamespace:
        commands.append((command, options))
        return SimpleNamespace(wait=lambda: 0, returncode=0)

    (tmp_path / "hostfile").write_text("one slots=1\ntwo slots=1\n")
    (tmp_path / "pdsh").write_text("#!/bin/sh\n")
    (tmp_path / "pdsh").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(runner, "DEEPSPEED_ENVIRONMENT_PATHS", [str(tmp_path)])
    monkeypatch.setattr(runner, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": start}))
    monkeypatch.setattr(runner.signal, "signal", lambda *_: None)
    return commands


def test_the_launcher_of_deepspeed_fails_on_a_blank_line_of_its_environment_file(
    tmp_path: Path, started: list[tuple[list[str], dict[str, Any]]]
) -> None:
    from deepspeed.launcher import runner

    (tmp_path / ".deepspeed_env").write_text("GLOO_SOCKET_IFNAME=eth0\n\n# of this cluster\n")
    with pytest.raises(ValueError, match="unpack"):
        runner.main(TWO_HOSTS)
        pytest.fail("the look at the lines of .deepspeed_env in preflight/hosts.py may be taken out")


def test_the_launcher_of_deepspeed_shows_passwords_and_leaves_other_variables_behind(
    started: list[tuple[list[str], dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.launcher import runner

    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "opensesame")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    runner.main(TWO_HOSTS)
    ((command, options),) = started
    assert "opensesame" in " ".join(command), "the look for secrets in preflight/launch_checks.py may be taken out"
    assert "eth7" not in " ".join(command), "launch/nodes.py need not write a .deepspeed_env"
    assert "preexec_fn" not in options, (
        "`main` of distributed/launcher.py may be taken out, if pdsh ends with its launcher"
    )


def start_one_rank(folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    """The launcher of a sleeping rank, and the rank's process."""
    (folder / "rank.py").write_text(SLEEPER)
    command = [str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", "1", "--master_port", str(free_port())]
    launcher = subprocess.Popen(
        [*command, str(folder / "rank.py"), str(folder / "pid")],
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        return launcher, number_of_sleeper(folder / "pid")
    except AssertionError:
        launcher.kill()
        raise


@pytest.mark.slow
@pytest.mark.launcher
def test_the_launcher_of_deepspeed_leaves_its_ranks_alone_when_it_is_killed(tmp_path: Path) -> None:
    launcher, rank = start_one_rank(tmp_path)
    launcher.kill()
    launcher.wait()
    time.sleep(5)
    assert still_runs(rank), "watch_launcher of distributed/launcher.py may be taken out"
    os.kill(rank, 9)


@pytest.mark.slow
@pytest.mark.launcher
def test_the_launcher_of_deepspeed_says_that_all_is_well_when_its_half_on_the_node_is_killed(tmp_path: Path) -> None:
    launcher, rank = start_one_rank(tmp_path)
    (half,) = psutil.Process(launcher.pid).children()
    half.kill()
    try:
        assert launcher.wait(60) == 0, "pretrain of launch/demo.sh need not look for the end of the training itself"
    finally:
        psutil.Process(rank).kill()
