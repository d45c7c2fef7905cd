"""Two hosts on one machine: network namespaces joined by a cable, an sshd in each, names of their own.

Needs root, `ip`, `nsenter`, `sshd`, `ssh` and `pdsh`; `missing()` says what is not there. Keys, configurations and
`/etc/hosts` lie in a folder of the test; nothing of the machine's own `/etc`, `/run` or `~/.ssh` is read or changed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

COMMANDS = ("ip", "nsenter", "unshare", "sshd", "ssh", "ssh-keygen", "pdsh")
PACKAGES = {"ip": "iproute2", "sshd": "openssh-server", "ssh": "openssh-client", "pdsh": "pdsh"}
NAMES = ("node-a", "node-b")
ADDRESSES = ("10.199.0.1", "10.199.0.2")
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_SSHD_CONFIG = """\
ListenAddress 0.0.0.0
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
"""
_SSH_CONFIG = """\
Host *
    IdentityFile {folder}/user_key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    StrictHostKeyChecking yes
    LogLevel ERROR
    ServerAliveInterval 5
    ServerAliveCountMax 4
"""
# /run is private too: sshd wants /run/sshd, which only its service makes.
_START = """\
set -e
mount --make-rprivate /
mount --bind "$1/hosts" /etc/hosts
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd
hostname "$2"
exec "$3" -D -e -f "$1/sshd_config"
"""


def missing() -> str | None:
    """What this machine lacks for two hosts, with what to install; None where all is there."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [name for name in COMMANDS if shutil.which(name, path=_SYSTEM_PATH) is None]
    if absent:
        packages = " ".join(sorted({PACKAGES.get(name, name) for name in absent}))
        return f"{', '.join(absent)} not found (apt-get install {packages})"
    probe = f"clozeworks-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode != 0:
        return f"no network namespaces: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", probe], check=True)
    return None


@dataclass(frozen=True)
class Node:
    """One of the hosts."""

    name: str
    address: str
    namespace: str
    sshd: subprocess.Popen[bytes]

    def command(self, words: Sequence[str], folder: Path) -> list[str]:
        """What runs `words` on this host in `folder`."""
        enter = ["nsenter", f"--target={self.sshd.pid}", "--mount", "--uts", "--net", "--"]
        return [*enter, "sh", "-c", 'cd "$0" && exec "$@"', str(folder), *words]

    def holds(self, pid: int) -> bool:
        """Whether a process runs on this host."""
        try:
            return os.stat(f"/proc/{pid}/ns/net").st_ino == os.stat(f"/proc/{self.sshd.pid}/ns/net").st_ino
        except OSError:
            return False


@dataclass(frozen=True)
class TwoNodes:
    """Both hosts and the cable between them."""

    folder: Path
    nodes: tuple[Node, Node]

    @property
    def ssh_options(self) -> str:
        """Of every ssh between them, for PDSH_SSH_ARGS_APPEND."""
        return f"-F {self.folder}/ssh_config"

    def cut(self) -> None:
        """Lose every packet in both directions; neither side is notified, as when a switch dies."""
        _ip("-n", f"{self.nodes[0].namespace}-switch", "link", "set", "dev", "bridge0", "down")

    def reconnect(self) -> None:
        """Join the hosts again."""
        _ip("-n", f"{self.nodes[0].namespace}-switch", "link", "set", "dev", "bridge0", "up")


@contextmanager
def two_nodes(folder: Path) -> Iterator[TwoNodes]:
    """Make the hosts, wait until each answers the other by ssh, and take them away again with all that runs there."""
    prefix = f"cw{os.getpid()}"
    spaces = [f"{prefix}-{name}" for name in NAMES]
    switch = f"{spaces[0]}-switch"
    made: list[str] = []
    servers: list[subprocess.Popen[bytes]] = []
    _write_configuration(folder)
    try:
        for space in (switch, *spaces):
            _ip("netns", "add", space)
            made.append(space)
            _ip("-n", space, "link", "set", "lo", "up")
        _ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        for number, (space, address) in enumerate(zip(spaces, ADDRESSES, strict=True)):
            _ip("link", "add", "eth0", "netns", space, "type", "veth", "peer", "name", f"port{number}", "netns", switch)
            _ip("-n", switch, "link", "set", "dev", f"port{number}", "master", "bridge0", "up")
            _ip("-n", space, "address", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "dev", "eth0", "up")
        _ip("-n", switch, "link", "set", "dev", "bridge0", "up")
        for name, space in zip(NAMES, spaces, strict=True):
            servers.append(_start_sshd(folder, name, space))
        first, second = (Node(*each) for each in zip(NAMES, ADDRESSES, spaces, servers, strict=True))
        nodes = TwoNodes(folder, (first, second))
        _wait_for_ssh(nodes)
        yield nodes
    finally:
        for space in made:
            _end_processes(space)
        for server in servers:
            server.wait(timeout=30)
        for space in reversed(made):
            subprocess.run(["ip", "netns", "delete", space], check=False)


def _write_configuration(folder: Path) -> None:
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    host_key = (folder / "host_key.pub").read_text().split()[:2]
    known = [" ".join([name, *host_key]) for name in (*NAMES, *ADDRESSES)]
    (folder / "known_hosts").write_text("\n".join(known) + "\n")
    (folder / "sshd_config").write_text(_SSHD_CONFIG.format(folder=folder))
    (folder / "ssh_config").write_text(_SSH_CONFIG.format(folder=folder))
    hosts = ["127.0.0.1 localhost", *(f"{address} {name}" for address, name in zip(ADDRESSES, NAMES, strict=True))]
    (folder / "hosts").write_text("\n".join(hosts) + "\n")


def _start_sshd(folder: Path, name: str, space: str) -> subprocess.Popen[bytes]:
    sshd = shutil.which("sshd", path=_SYSTEM_PATH)
    inside = ["unshare", "--mount", "--uts", "sh", "-c", _START, "sh", str(folder), name, str(sshd)]
    log = (folder / f"sshd-{name}.log").open("wb")
    return subprocess.Popen(["ip", "netns", "exec", space, *inside], stdout=log, stderr=log)


def _wait_for_ssh(nodes: TwoNodes) -> None:
    deadline = time.monotonic() + 60
    for here, there in (nodes.nodes, nodes.nodes[::-1], nodes.nodes[:1] * 2):
        command = here.command(["ssh", "-F", f"{nodes.folder}/ssh_config", there.name, "hostname"], nodes.folder)
        while True:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            if done.stdout.strip() == there.name:
                break
            assert time.monotonic() < deadline, f"{here.name} does not reach {there.name}: {done.stderr}"
            time.sleep(0.2)


def _end_processes(space: str) -> None:
    """SIGKILL to whatever still runs in a namespace."""
    listed = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True).stdout.split()
    for pid in map(int, listed):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
