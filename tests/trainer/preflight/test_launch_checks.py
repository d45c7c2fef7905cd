from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.base.errors import UsageError
from tests.support.error_codes import coded
from trainer.preflight import launch_checks
from trainer.preflight.launch_checks import (
    Ancestor,
    check_starters,
    exposed,
    exposure,
    hostfile_of,
    starters,
)

REPOSITORY = Path(__file__).resolve().parents[3]
PRETRAIN = str(REPOSITORY / "launch" / "pretrain.py")


def test_the_processes_above_come_with_their_words_and_folders(tmp_path):
    code = "from trainer.preflight.launch_checks import processes_above as above; print([each.pid for each in above()])"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    child = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, check=True)
    above = json.loads(child.stdout)
    assert above[: above.index(os.getppid()) + 1] == [os.getpid(), os.getppid()]
    process = Ancestor.of(os.getpid())
    assert process is not None and list(process.words) == sys.orig_argv and process.folder == Path.cwd()


@pytest.mark.parametrize(
    ("words", "hostfile"),
    [
        (["python", "-m", "deepspeed.launcher.runner", "--hostfile", "hosts", "launch/pretrain.py"], "hosts"),
        (["python", "/venv/bin/deepspeed", "--hostfile=h", "launch/pretrain.py", "--config", "x"], "h"),
        (["python", "/venv/bin/deepspeed", "-H", "h", "launch/pretrain.py"], "h"),
        (["python", "/venv/bin/deepspeed", "--num_gpus", "2", "launch/pretrain.py", "--hostfile", "h"], None),
        (["bash", "-c", "deepspeed --hostfile hosts launch/pretrain.py"], None),
    ],
)
def test_the_hostfile_is_found_among_the_launchers_own_words(words, hostfile):
    assert hostfile_of(words) == hostfile


def test_a_secret_in_the_words_of_a_process_is_reported_by_its_name():
    environment = {"MLFLOW_TRACKING_PASSWORD": "correct horse", "AZURE_STORAGE_KEY": "battery=="}
    assert exposed(["bash", "-c", "export MLFLOW_TRACKING_PASSWORD='correct horse'; python"], environment) == [
        "MLFLOW_TRACKING_PASSWORD"
    ]
    assert exposed(["env", "AZURE_STORAGE_KEY=battery==", "python"], environment) == ["AZURE_STORAGE_KEY"]
    assert exposed(["python", "pretrain.py"], environment) == []


@pytest.mark.spawn
def test_the_pdsh_that_began_a_launch_is_looked_at_and_that_of_another_is_not(monkeypatch):
    secret = "correct-horse-battery"
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", secret)
    words = (sys.executable, "-c", "import time; time.sleep(600)")
    marks = ("--world_info=of-this-test", "--master_port=29999")
    launch = Ancestor(os.getpid(), ("python", "-m", "deepspeed.launcher.launch", *marks, "pretrain.py"), Path.cwd())
    line = f"export MLFLOW_TRACKING_PASSWORD={secret}; python -m deepspeed.launcher.launch "
    mine = subprocess.Popen([*words, line + " ".join(marks)])
    other = subprocess.Popen([*words, line + "--world_info=of-another --master_port=29999"])
    try:
        assert [process.pid for process in starters([launch])] == [mine.pid]
        told = exposure(starters([launch]))
    finally:
        mine.kill()
        other.kill()
    assert told is not None and f"process {mine.pid} " in told and secret not in told
    assert list(starters([])) == []


def test_a_secret_on_this_host_refuses_its_rank(monkeypatch):
    check_starters()
    monkeypatch.setattr(launch_checks, "exposure", lambda processes: "a secret is in the arguments of pdsh on node-a")
    with pytest.raises(UsageError, match="on node-a", check=coded("secret-in-arguments")):
        check_starters()


def pretrain(words: list[str], folder: Path, shards: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [*words, PRETRAIN, "--config", "tiny_cpu", f"data.shards={shards}", f"output_dir={folder}/run"]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(REPOSITORY)} | env
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)


@pytest.mark.long
@pytest.mark.spawn
def test_a_missing_hostfile_does_not_train_on_one_node(tmp_path, small_shards):
    """DeepSpeed's launcher would start it nevertheless: tests/workarounds/test_deepspeed_launcher.py."""
    start = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, *sys.argv[3:]]).returncode)"
    (tmp_path / "deepspeed").write_text(start)
    done = pretrain([sys.executable, str(tmp_path / "deepspeed"), "--hostfile", "hosts"], tmp_path, small_shards)
    assert done.returncode != 0 and "error: the launcher's --hostfile hosts does not exist" in done.stderr
    assert not (tmp_path / "run").exists() and 'pretrain.py", line' not in done.stderr


@pytest.mark.spawn
@pytest.mark.fault(
    row="47b",
    fault="a launcher puts MLFLOW_TRACKING_PASSWORD on the command line of the shell that starts the ranks",
    required="refused before anything starts, without repeating it",
)
def test_a_secret_in_the_arguments_of_a_process_above_is_refused(tmp_path, small_shards):
    secret = "correct-horse-battery"
    start = f'export MLFLOW_TRACKING_PASSWORD={secret}; "$@"; exit $?'
    done = pretrain(["bash", "-c", start, "bash", sys.executable], tmp_path, small_shards)
    assert (
        done.returncode == 2 and "error: the value of MLFLOW_TRACKING_PASSWORD appears in the arguments" in done.stderr
    )
    assert secret not in done.stdout + done.stderr and not (tmp_path / "run").exists()
