"""The hosts of a run: DeepSpeed's hostfile, and checks of ssh, versions, clocks, shared folders and bandwidth."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from data_prep.base.environment import environment_now
from data_prep.base.errors import UsageError, UserError
from data_prep.base.known_secrets import secrets_of
from data_prep.base.urls import is_remote
from trainer.checkpoint.compatibility import PACKAGES
from trainer.config.run_config import RunConfig
from trainer.distributed.rendezvous import LOST_RANK_EXIT_STATUS
from trainer.preflight.finding import Finding
from trainer.preflight.launch_checks import SECRET_REMEDY
from trainer.preflight.machine_checks import LARGEST_SKEW_SECONDS, nearest_folder, probe_file
from trainer.preflight.service_checks import COLLECTIVE_SECONDS, judge_collective

PROBE = (
    "import importlib.metadata as m, json, os, sys, time; "
    f"print(json.dumps([sys.version.split()[0], [m.version(p) for p in {PACKAGES!r}], time.time(), "
    "[os.path.exists(p) for p in sys.argv[1:]]]))"
)
"""What is run on every host; it imports no package, so it takes as long as the connection."""

TORCHRUN = (
    "from trainer.distributed.rank_environment import raise_descriptor_limit; raise_descriptor_limit(); "
    "from torch.distributed.run import main; main()"
)

SSH_SECONDS = 20
LAUNCHER_PREFIXES = ("MLFLOW", "PYTHON", "MV2", "UCX")
"""What deepspeed 0.19.8 forwards by itself; NCCL_ too where there is CUDA."""
NEEDED_PREFIXES = (
    *("AWS_", "GLOO_", "HF_", "NCCL_", "OMP_", "TORCH_", "TORCHINDUCTOR_", "CUBLAS_"),
    *("DS_ACCELERATOR", "XDG_CACHE_HOME"),
)
"""What the ranks of other hosts need as well, where it is set."""
_COLLECTIVE_PREFIXES = ("GLOO_", "NCCL_", "OMP_", "DS_ACCELERATOR")


_HOST_LINE = re.compile(r"(\S+)\s+slots=([1-9][0-9]{0,5})")
# The name becomes a word of ssh and pdsh: none that begins with a hyphen, and none that a shell or pdsh would expand.
_HOST = re.compile(r"(?:[\w.-]+@)?\w[\w.:-]*", re.ASCII)
_SHOWN_CHARACTERS = 100


def read_hostfile(path: str) -> dict[str, int]:
    """Return the slots by host, in the order of the file; refuse lines that the launcher would misread.

    Raises:
        UsageError: it is missing (the deepspeed launcher would only warn, and train on one node), or a line is wrong.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")  # lines end as in the launcher
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(
            f"hostfile {path} cannot be read ({why}), and the launcher would train on one node",
            fix="give the path of a file with lines 'HOST slots=N'",
            code="missing-hostfile",
        ) from None
    hosts: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _HOST_LINE.fullmatch(text)
        if match is None or match[1] in hosts:
            quoted = repr(text[:_SHOWN_CHARACTERS])
            raise UsageError(
                f"hostfile {path}, line {number}: {quoted} is not 'HOST slots=N', each host once",
                fix="correct the line",
                code="invalid-hostfile",
            )
        if _HOST.fullmatch(match[1]) is None or match[1].startswith("-"):
            raise UsageError(
                f"hostfile {path}, line {number}: {match[1][:_SHOWN_CHARACTERS]!r} is not a host name",
                fix=("use letters, digits, dots, colons, hyphens and underscores, with USER@ before it where needed"),
                code="invalid-hostfile",
            )
        hosts[match[1]] = int(match[2])
    if not hosts:
        raise UsageError(
            f"hostfile {path} lists no host",
            fix="write lines 'HOST slots=N'",
            code="invalid-hostfile",
        )
    return hosts


@dataclass(frozen=True)
class HostAnswer:
    """The answer of a host; its clock in seconds ahead of ours."""

    python: str
    versions: list[str]
    skew_seconds: float
    has_paths: list[bool]


def check_hosts(hosts: Sequence[str], config: RunConfig) -> Iterator[Finding]:
    """Check that each host accepts ssh, has the same versions and time, and sees the same folders."""
    here = [sys.version.split()[0], *(importlib.metadata.version(package) for package in PACKAGES)]
    local_shards = [url for url in config.data_sets if not is_remote(url)]
    there = nearest_folder(Path(config.output_dir).absolute())
    try:
        with probe_file(there) as probe, ThreadPoolExecutor(max_workers=32) as pool:
            paths = [str(probe), *(str(Path(url.removeprefix("file://")).absolute()) for url in local_shards)]
            answers = list(pool.map(lambda host: ask_host(host, paths), hosts))
    except OSError as error:
        text = f"{there} cannot be written ({error.strerror}), so hosts cannot be checked for seeing it; set output_dir"
        yield Finding("fail", "host", f"{text} to a directory that they share")
        return
    for host, answer in zip(hosts, answers, strict=True):
        yield judge_host(host, answer, here, there, local_shards, config.checkpoint.upload_to is not None)


def judge_host(
    host: str, answer: HostAnswer | str, here: list[str], shared: Path, local_shards: list[str], has_store: bool
) -> Finding:
    """Return the finding about a host's answer."""
    if isinstance(answer, str):
        text = f"{host}: {answer}; 'ssh {host} {sys.executable} --version' must work without a password"
        return Finding("fail", "host", text)
    there = [answer.python, *answer.versions]
    if there != here:
        names = ("python", *PACKAGES)
        other = [f"{name} {b} (here {a})" for name, a, b in zip(names, here, there, strict=True) if a != b]
        return Finding("fail", "host", f"{host} has {', '.join(other)}; install the same versions on every host")
    if not answer.has_paths[0] and not has_store:
        text = f"{host} cannot access {shared}: output_dir must be a directory that all hosts share; or set "
        return Finding("fail", "host", text + "checkpoint.upload_to to a store that all reach")
    unseen = [url for url, seen in zip(local_shards, answer.has_paths[1:], strict=True) if not seen]
    if unseen:
        text = f"{host} cannot access {', '.join(unseen)}; put the shards into a shared directory or a store"
        return Finding("fail", "host", text)
    if abs(answer.skew_seconds) > LARGEST_SKEW_SECONDS:
        text = f"{host}: its clock is {answer.skew_seconds:+.1f} s off; synchronize the clocks with a time server"
        return Finding("warn", "host", text)
    folders = "the same folders" if answer.has_paths[0] else "an output_dir of its own (checkpoint.upload_to is set)"
    return Finding("ok", "host", f"{host}: same versions, {folders}, clock {answer.skew_seconds:+.1f} s")


def ask_host(host: str, paths: Sequence[str] = ()) -> HostAnswer | str:
    """Return a host's answer to `PROBE`, or a text that says what went wrong."""
    before = time.time()
    try:
        done = _ssh(host, [sys.executable, "-c", PROBE, *paths], SSH_SECONDS)
    except FileNotFoundError:
        return "ssh is not installed on this machine"
    except subprocess.TimeoutExpired:
        return f"no answer in {SSH_SECONDS} s"
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    try:
        python, versions, clock, has_paths = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return f"unreadable answer: {done.stdout[:100]!r}"
    return HostAnswer(python, versions, clock - (before + time.time()) / 2, has_paths)


def check_forwarding(hosts: Sequence[str], device_type: str) -> Iterator[Finding]:
    """Check which variables the deepspeed launcher forwards to the ranks of other hosts, and that none is a secret."""
    if shutil.which("pdsh") is None:
        yield Finding("fail", "pdsh", "not found, and 'deepspeed --hostfile' needs it to start the ranks; install pdsh")
    problems = environment_file_problems()
    for problem in problems:
        yield Finding("fail", "forwarding", problem)
    forwarded = dict(_environment_file_lines())
    given = {name: value for name, value in environment_now().items() if name.startswith(LAUNCHER_PREFIXES)}
    exposed = sorted({*secrets_of(given), *secrets_of(forwarded)})
    if exposed:
        text = f"{', '.join(exposed)} would be visible on the command lines of pdsh, ssh and bash; {SECRET_REMEDY}"
        yield Finding("fail", "secrets", text)
    own = ("NCCL",) if device_type == "cuda" else ()
    forgotten = sorted(
        name
        for name in environment_now()
        if name.startswith(NEEDED_PREFIXES) and not name.startswith(own or ("\0",)) and name not in forwarded
    )
    forgotten = [name for name in forgotten if name not in secrets_of(environment_now())]
    if forgotten:
        text = f"{', '.join(forgotten)} set here, but not in .deepspeed_env, so only this host has it; write lines "
        yield Finding("warn", "forwarding", text + "NAME=VALUE there, or start with `clozeworks nodes`")
    if not problems and not exposed and not forgotten:
        yield Finding("ok", "forwarding", f"{', '.join(sorted(forwarded)) or 'nothing'} by .deepspeed_env; no secrets")
    yield from _check_keep_alive(hosts[0])


def environment_file_problems() -> list[str]:
    """Return the lines on which the launcher's reader of `.deepspeed_env` would fail, with the reason."""
    problems = []
    for path in _environment_files():
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            name, equals, _ = line.partition("=")
            if not equals or not name.strip().isidentifier():
                text = f"{path}, line {number}: {line.strip()[:40]!r} is not NAME=VALUE, and the launcher fails on it"
                problems.append(f"{text}; blank lines and comments must go too")
    return problems


def check_collective_of_hosts(hosts: dict[str, int], address: str | None, device_type: str) -> Iterator[Finding]:
    """Measure an all-reduce between all ranks of all hosts."""
    backend = "nccl" if device_type == "cuda" else "gloo"
    try:
        address = address or address_of(next(iter(hosts)))
    except UnreachableHost as error:
        yield Finding("fail", "collective", f"{error.problem}; {error.fix}")
        return
    environment = dict(_environment_file_lines()) | environment_now()
    wanted = {name: value for name, value in environment.items() if name.startswith(_COLLECTIVE_PREFIXES)}
    common = ["env", *(f"{name}={value}" for name, value in sorted(wanted.items()) if name not in secrets_of(wanted))]
    common += [sys.executable, "-c", TORCHRUN, f"--nnodes={len(hosts)}", f"--master_addr={address}"]
    common += [f"--master_port={20000 + secrets.randbelow(20000)}"]
    ranks = [f"--nproc_per_node={slots}" for slots in hosts.values()]
    program = ["-m", "trainer.preflight.service_checks", backend]
    words = [[*common, f"--node_rank={number}", slots, *program] for number, slots in enumerate(ranks)]
    try:
        with ThreadPoolExecutor(max_workers=len(hosts)) as pool:
            done = list(pool.map(lambda host, command: _ssh(host, command, COLLECTIVE_SECONDS), hosts, words))
    except subprocess.TimeoutExpired:
        text = f"{sum(hosts.values())} ranks over {backend} did not end in {COLLECTIVE_SECONDS} s; check firewalls and "
        yield Finding("fail", "collective", text + "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME")
        return
    failed = [host for host, one in zip(hosts, done, strict=True) if one.returncode != 0]
    yield judge_collective(done, ", ".join(failed) or "the all-reduce", f"{len(hosts)} hosts, ")


def _check_keep_alive(host: str) -> Iterator[Finding]:
    command = ["ssh", "-G", *_ssh_arguments(), host]
    try:
        options = subprocess.run(command, capture_output=True, text=True, timeout=SSH_SECONDS).stdout
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return  # `check_hosts` reports it
    seconds = next((line.split()[1] for line in options.splitlines() if line.startswith("serveraliveinterval ")), "0")
    if seconds == "0":
        text = "ServerAliveInterval is 0: the launcher would wait for hours for an unreachable host; set it in "
        yield Finding("warn", "ssh", text + "~/.ssh/config, or start with `clozeworks nodes`")
    else:
        yield Finding("ok", "ssh", f"detects an unreachable host (ServerAliveInterval {seconds} s)")


class UnreachableHost(UserError):
    """A host that ssh does not reach; a scheduler may start the run again later."""

    exit_status = LOST_RANK_EXIT_STATUS


def address_of(host: str) -> str:
    """Return the first address of a host by its own answer over ssh, as the deepspeed launcher does.

    Raises:
        UnreachableHost: ssh does not reach the host, or the host has no address.
    """
    try:
        done = _ssh(host, ["hostname", "-I"], SSH_SECONDS)
    except FileNotFoundError:
        reason = "ssh is not installed on this machine"
    except subprocess.TimeoutExpired:
        reason = f"no answer in {SSH_SECONDS} s"
    else:
        if done.returncode == 0 and done.stdout.split():
            return done.stdout.split()[0]
        reason = (done.stderr.strip().splitlines() or ["hostname -I printed no address"])[-1]
    raise UnreachableHost(
        f"{host} does not report its address over ssh: {reason.rstrip('.')}",
        fix=f"make `ssh {host} hostname -I` work here without a question, or give --master-addr",
        code="unreachable-host",
    )


def _ssh(host: str, words: Sequence[str], seconds: int) -> subprocess.CompletedProcess[str]:
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={SSH_SECONDS // 2}", *_ssh_arguments()]
    command = ["ssh", *options, "--", host, shlex.join(words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL)


def _ssh_arguments() -> list[str]:
    return os.environ.get("PDSH_SSH_ARGS_APPEND", "").split()  # as the launcher's own connections


def _environment_files() -> list[Path]:
    name = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    files = [path.resolve() for path in (Path.home() / name, Path(name)) if path.is_file()]
    return list(dict.fromkeys(files))


def _environment_file_lines() -> Iterator[tuple[str, str]]:
    for path in _environment_files():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            name, equals, value = line.partition("=")
            if equals:
                yield name.strip(), value.strip()
