"""With stand-ins for ssh; tests/system/test_nodes.py asks two real hosts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from data_prep.base.errors import UsageError
from tests.support.error_codes import coded
from tests.support.toy_run import preset_config
from trainer.preflight import hosts
from trainer.preflight.finding import Finding
from trainer.preflight.hosts import read_hostfile


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """It runs the command here: as another version on the host `old`, without the folders on `far`, not on `gone`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(
        f"#!{sys.executable}\n"
        "import os, subprocess, sys\n"
        f"open({str(tmp_path / 'words')!r}, 'a').write(repr(sys.argv) + chr(10))\n"
        "if '-G' in sys.argv:\n    sys.exit(print('serveraliveinterval', os.environ.get('ALIVE', '0')))\n"
        "host, command = sys.argv[-2:]\n"
        "if host == 'gone':\n    sys.exit('ssh: connect to host gone port 22: No route to host')\n"
        "answer = subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout\n"
        "old = 'import importlib.metadata as m; print(m.version(\"deepspeed\"))'\n"
        "deepspeed = subprocess.run([sys.executable, '-c', old], capture_output=True, text=True).stdout.strip()\n"
        "answer = answer.replace(deepspeed, '0.1.2') if host == 'old' else answer\n"
        "print(answer.replace('true', 'false') if host == 'far' else answer)\n"
    )
    (folder / "ssh").chmod(0o755)
    (folder / "pdsh").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith((*hosts.LAUNCHER_PREFIXES, *hosts.NEEDED_PREFIXES)):
            monkeypatch.delenv(name)
    return folder


def test_an_output_dir_that_cannot_be_written_fails_without_a_traceback(ssh, tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "touch", lambda path: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    (finding,) = hosts.check_hosts(["same"], preset_config(output_dir=tmp_path / "run"))
    assert finding.level == "fail" and f"{tmp_path} cannot be written (Permission denied)" in finding.text


@pytest.mark.long
@pytest.mark.spawn
def test_hosts_with_other_versions_other_folders_or_no_answer_fail(ssh, tmp_path, small_shards):
    config = preset_config(shards=small_shards, output_dir=tmp_path / "run")
    same, old, far, gone = hosts.check_hosts(["same", "old", "far", "gone"], config)
    assert same.level == "ok" and "same versions, the same folders" in same.text, same
    assert old.level == "fail" and "deepspeed 0.1.2 (here " in old.text
    assert far.level == "fail" and "far cannot access" in far.text and "checkpoint.upload_to" in far.text
    assert gone.level == "fail" and "No route to host" in gone.text
    assert not list(tmp_path.glob(".clozeworks-doctor-*")), "the probe is gone"
    stored = preset_config("checkpoint.upload_to=s3://bucket/run", shards=small_shards, output_dir=tmp_path / "run")
    (far,) = hosts.check_hosts(["far"], stored)
    assert far.level == "fail" and str(small_shards) in far.text, "the shards are not there either"


def test_the_address_of_a_host_is_its_own_answer_and_a_silent_host_is_an_error_to_try_again(ssh, monkeypatch):
    (ssh / "hostname").write_text("#!/bin/sh\necho 10.1.2.3 172.17.0.1\n")
    (ssh / "hostname").chmod(0o755)
    assert hosts.address_of("same") == "10.1.2.3"
    with pytest.raises(hosts.UnreachableHost, match="No route to host", check=coded("unreachable-host")) as unreachable:
        hosts.address_of("gone")
    assert unreachable.value.exit_status == 76 and "ssh gone hostname -I" in unreachable.value.fix
    (ssh / "hostname").write_text("#!/bin/sh\n")
    with pytest.raises(hosts.UnreachableHost, match="no address", check=coded("unreachable-host")):
        hosts.address_of("same")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(hosts.UnreachableHost, match="ssh is not installed", check=coded("unreachable-host")):
        hosts.address_of("same")


def forwarding() -> dict[str, Finding]:
    return {finding.name: finding for finding in hosts.check_forwarding(["one", "two"], "cpu")}


def test_forwarded_variables_are_reported_and_lost_ones_warned_of(ssh, tmp_path, monkeypatch):
    monkeypatch.setenv("ALIVE", "15")
    (tmp_path / ".deepspeed_env").write_text("GLOO_SOCKET_IFNAME=eth0\n")
    found = forwarding()
    assert found["forwarding"].level == "ok" and "GLOO_SOCKET_IFNAME by .deepspeed_env" in found["forwarding"].text
    assert found["ssh"].level == "ok" and "ServerAliveInterval 15 s" in found["ssh"].text
    monkeypatch.setenv("AWS_PROFILE", "lab")
    found = forwarding()["forwarding"]
    assert found.level == "warn" and found.text.startswith("AWS_PROFILE set here")


def test_an_ssh_that_waits_for_ever_is_warned_of(ssh):
    found = forwarding()
    assert found["ssh"].level == "warn" and "ServerAliveInterval is 0" in found["ssh"].text


@pytest.mark.parametrize("line", ["", "# comment", "export A=1", "A"])
def test_a_line_on_which_the_launcher_would_fail_fails(line, ssh, tmp_path):
    (tmp_path / ".deepspeed_env").write_text(f"GLOO_SOCKET_IFNAME=eth0\n{line}\n")
    found = forwarding()["forwarding"]
    assert found.level == "fail" and ".deepspeed_env, line 2" in found.text


@pytest.mark.fault(
    row="47b",
    fault="a secret in .deepspeed_env, or in a variable that the deepspeed launcher forwards",
    required="the doctor fails and names the variable, not its value",
)
def test_secrets_that_the_launcher_would_show_fail(ssh, tmp_path, monkeypatch):
    (tmp_path / ".deepspeed_env").write_text("AWS_SECRET_ACCESS_KEY=correct-horse\n")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:battery@mlflow.example.org")
    found = forwarding()["secrets"]
    assert found.level == "fail" and "AWS_SECRET_ACCESS_KEY, MLFLOW_TRACKING_URI" in found.text
    assert "horse" not in found.text and "battery" not in found.text


@pytest.mark.fault(
    row="48", fault="shell metacharacters in a path that is asked for on a host", required="passed as data"
)
@pytest.mark.spawn
def test_a_path_with_shell_characters_is_data_for_the_other_host(ssh, tmp_path):
    strange = tmp_path / "a; touch broken #$(touch broken)"
    strange.mkdir()
    answer = hosts.ask_host("same", [str(strange), str(tmp_path / "none")])
    assert not isinstance(answer, str) and answer.has_paths == [True, False]
    assert not (tmp_path / "broken").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "lists no host"), ("one slots=two", "line 1"), ("one slots=2\none slots=2", "line 2"), ("one", "line 1")],
)
def test_a_hostfile_that_the_launcher_would_misread_is_refused(text, said, tmp_path):
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(UsageError, match=said):
        read_hostfile(str(tmp_path / "hosts"))


def test_a_missing_hostfile_is_refused(tmp_path):
    with pytest.raises(UsageError, check=coded("missing-hostfile")):
        read_hostfile(str(tmp_path / "none"))


def test_hosts_keep_their_order_and_comments_go(tmp_path):
    (tmp_path / "hosts").write_text(
        "# nodes\none slots=2\n\nme@two.example.org slots=8 # the big one\n10.0.0.7 slots=1\n"
    )
    hosts = read_hostfile(str(tmp_path / "hosts"))
    assert list(hosts.items()) == [("one", 2), ("me@two.example.org", 8), ("10.0.0.7", 1)]


@pytest.mark.fault(
    row="48",
    fault="shell metacharacters and ssh options as host names of a hostfile",
    required="refused with the line; nothing is run",
)
@pytest.mark.parametrize(
    "name", ["-oProxyCommand=touch${IFS}x", "$(touch${IFS}x)", "a;b", "`x`", "n[1-4]", "a@b@c", "%h", "-x"]
)
def test_a_name_that_a_shell_ssh_or_pdsh_would_read_otherwise_is_refused(name, tmp_path):
    (tmp_path / "hosts").write_text(f"one slots=1\n{name} slots=1\n")
    with pytest.raises(UsageError, match="line 2", check=coded("invalid-hostfile")):
        read_hostfile(str(tmp_path / "hosts"))
