from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.base.errors import UsageError
from launch.nodes import forwarded_variables, is_here, launcher_command, launcher_environment, quoted
from tests.support import fork_server
from tests.support.error_codes import coded

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = str(REPOSITORY / "launch" / "nodes.py")
NASTY = [
    "a b",
    "$(touch broken)",
    "it's",
    'say "so"',
    "100%h",
    "a;b&c|d",
    "*",
    "~",
    "ü ",
    "back\\slash",
    "#x",
    "",
    "`id`",
    "%n",
]


@pytest.mark.fault(
    row="48",
    fault="shell metacharacters in file names, experiment names and settings of a run on several hosts",
    required="they reach pretrain.py as they are",
)
def test_arguments_reach_the_ranks_as_they_are(tmp_path):
    """The way of the words: deepspeed's own pdsh runner, pdsh's reading of %, and the shell of the other host."""
    from argparse import Namespace

    from deepspeed.launcher.multinode_runner import PDSHRunner

    arguments = Namespace(
        user_args=[quoted(word) for word in NASTY], user_script="-c", launcher_args="", master_addr="a", master_port=1,
        venv_script=None, no_python=False, module=False, no_local_rank=True, save_pid=False,
        enable_each_rank_log=None, ssh_port=None,
    )  # fmt: skip
    command, _, _ = PDSHRunner(arguments, "world").get_cmd({}, {"one": [0]})
    words = command[command.index("-c") + 1 :]
    assert not any("%" in word for word in words), "pdsh would read it"
    program = "import json, sys; print(json.dumps(sys.argv[1:]))"
    line = f"{sys.executable} -c '{program}' " + " ".join(words)
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True)
    import json

    assert json.loads(done.stdout) == NASTY and not list(tmp_path.iterdir())


def test_plain_words_stay_readable():
    assert quoted("data.shards=/data/shards") == "data.shards=/data/shards" and quoted("a b") == r"$'a\x20b'"


@pytest.mark.fault(
    row="47b",
    fault="secrets in the environment of a start on several hosts",
    required="they are neither handed on nor on any command line, and their names are reported",
)
def test_secrets_go_neither_into_the_environment_nor_onto_a_command_line():
    environment = {
        "MLFLOW_TRACKING_PASSWORD": "correct-horse",
        "AWS_SECRET_ACCESS_KEY": "battery",
        "AZURE_STORAGE_KEY": "staple==",
        "AWS_PROFILE": "lab",
        "PATH": "/bin",
        "PDSH_SSH_ARGS_APPEND": "-F config",
    }
    cleaned = launcher_environment(environment, "eth1")
    assert not any(secret in str(cleaned) for secret in ("battery", "correct", "staple"))
    assert cleaned["PDSH_SSH_ARGS_APPEND"].startswith("-F config -o ServerAliveInterval=")
    assert forwarded_variables(cleaned, []) == {
        "AWS_PROFILE": "lab",
        "GLOO_SOCKET_IFNAME": "eth1",
        "NCCL_SOCKET_IFNAME": "eth1",
    }
    with pytest.raises(UsageError, match="tracking.uri", check=coded("secret-in-arguments")):
        launcher_command("hosts", None, 1, ["tracking.uri=https://me:word@host"])
    for name in ("MLFLOW_TRACKING_PASSWORD", "AZURE_STORAGE_KEY"):
        with pytest.raises(UsageError, match=name, check=coded("variable-not-forwarded")):
            forwarded_variables(cleaned, [name])


@pytest.mark.parametrize("value", ["$(x)", 'a"b', "a\nb", "`x`", "100%h"])
def test_a_variable_that_a_shell_between_would_read_is_refused(value):
    with pytest.raises(UsageError, match="MLFLOW_EXPERIMENT_NAME", check=coded("unquotable-variable")):
        forwarded_variables({"MLFLOW_EXPERIMENT_NAME": value}, [])


def test_a_host_is_here_where_its_address_is():
    assert is_here("localhost") and is_here("me@127.0.0.1")
    assert not is_here("192.0.2.1") and not is_here("node.invalid")


@pytest.mark.long
@pytest.mark.skipif(
    [quoted(SCRIPT), quoted(sys.executable)] != [SCRIPT, sys.executable],
    reason="the launcher does not quote its paths, and one here needs it",
)
def test_a_dry_run_shows_what_would_be_started_and_mistakes_are_reported(tmp_path):
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "HF_TOKEN": "hf_secret_word"}
        return fork_server.run([SCRIPT, *words], tmp_path, environment)

    (tmp_path / "hosts").write_text("one slots=8\ntwo slots=8\n")
    done = run(
        "--hostfile", "hosts", "--interface", "eth0", "--dry-run", "--", "--config", "bert_large", "output_dir=a b"
    )
    assert done.returncode == 0, done.stderr
    assert "GLOO_SOCKET_IFNAME=eth0\n" in done.stdout and "trainer.distributed.launcher --hostfile hosts" in done.stdout
    assert "--force_multi" not in done.stdout
    (tmp_path / "far").write_text("node.invalid slots=8\n")
    assert "HF_TOKEN" in done.stderr and "hf_secret" not in done.stdout + done.stderr
    words = [SCRIPT, "--hostfile", "far", "--dry-run", "--", "--config", "x"]
    far = fork_server.run(words, tmp_path, os.environ | {"PYTHONPATH": str(REPOSITORY)})
    assert "--force_multi --no_ssh_check" in far.stdout
    for words, message in (
        (["--hostfile", "none", "--", "x"], "hostfile none cannot be read"),
        (["--hostfile", "hosts"], "[missing-arguments]"),
        (["--hostfile", "hosts", "--master-port", "99999999", "--", "x"], "must be at most 65535, got 99999999"),
        (["--hostfile", "hosts", "--dry-run", "--", "--config", "bert_largee"], "configuration bert_largee does not"),
    ):
        done = fork_server.run([SCRIPT, *words], tmp_path, os.environ | {"PYTHONPATH": str(REPOSITORY)})
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_a_start_without_pdsh_or_without_the_first_host_is_one_paragraph(tmp_path):
    (tmp_path / "hosts").write_text("node.invalid slots=1\nother.invalid slots=1\n")
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "ssh").write_text("#!/bin/sh\necho 'Host key verification failed.' >&2\nexit 255\n")
    (programs / "ssh").chmod(0o755)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "PATH": str(programs)}
    words = [SCRIPT, "--hostfile", "hosts", "--", "--config", "tiny_cpu"]
    done = fork_server.run(words, tmp_path, environment)
    assert done.returncode == 2 and "[missing-pdsh]" in done.stderr and "Traceback" not in done.stderr
    (programs / "pdsh").symlink_to("/bin/true")
    done = fork_server.run(words, tmp_path, environment)
    assert done.returncode == 76 and "Traceback" not in done.stderr
    assert "Host key verification failed. Fix: make `ssh node.invalid hostname -I` work" in done.stderr
