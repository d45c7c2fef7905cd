"""Checks of the launch before any computation: a missing hostfile, secrets in `ps`.

The `deepspeed` launcher only warns where the file of `--hostfile` is missing and trains on one node, and on several
nodes it puts MLFLOW_ variables and the lines of `.deepspeed_env` on the command line of pdsh, ssh and the remote shell,
where every user of these hosts reads them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from data_prep.base.environment import environment_now
from data_prep.base.errors import UsageError
from data_prep.base.known_secrets import secrets_of
from trainer.distributed.launcher import ancestors

SECRET_REMEDY = (
    "keep it in a file of your own on every host (~/.mlflow/credentials, ~/.aws/credentials, both with mode 600) and "
    "remove it from the environment and from .deepspeed_env, or start with `clozeworks nodes`, which never forwards it"
)


@dataclass(frozen=True)
class Ancestor:
    """A process above this one: its number, the words of its command line and its working folder."""

    pid: int
    words: tuple[str, ...]
    folder: Path

    @classmethod
    def of(cls, pid: int) -> Ancestor | None:
        """Return the process; None if the system does not describe it."""
        try:
            process = psutil.Process(pid)
            return cls(pid, tuple(process.cmdline()), Path(process.cwd()))
        except psutil.Error:
            return None


def check_launch() -> None:
    """Refuse a launch that went wrong before this process started.

    Raises:
        UsageError: the launcher's hostfile does not exist, or the arguments of a process contain a secret.
    """
    above = list(processes_above())
    for process in above:
        if (missing := missing_hostfile(process)) is not None:
            raise UsageError(
                f"the launcher's --hostfile {missing} does not exist, so it would train on this node alone",
                fix="give the path of a file with lines 'HOST slots=N', or leave --hostfile out for one node",
                code="missing-hostfile",
            )
    if (exposed := exposure(above)) is not None:
        raise UsageError(exposed, fix=SECRET_REMEDY, code="secret-in-arguments")


def check_starters() -> None:
    """Refuse a start on several hosts whose pdsh or ssh has a secret in its arguments.

    They run on one of the hosts and above no rank, as the shells between are replaced by what they start. So each rank
    looks on its own host.

    Raises:
        UsageError: there is one on this host.
    """
    if (exposed := exposure(starters(list(processes_above())))) is not None:
        raise UsageError(exposed, fix=SECRET_REMEDY, code="secret-in-arguments")


def exposure(processes: Iterable[Ancestor]) -> str | None:
    """Describe the first process with a secret of the environment in its arguments; None if there is none."""
    for process in processes:
        for name in exposed(process.words, environment_now()):
            return (
                f"the value of {name} appears in the arguments of process {process.pid} ({process.words[0]}) on "
                f"{socket.gethostname()}, where every user of that host can read it; replace the secret"
            )
    return None


def starters(above: Sequence[Ancestor]) -> Iterator[Ancestor]:
    """Yield pdsh and its ssh, if this host has them: they started the `launch.py` among `above` and on other hosts."""
    launch = next((process.words for process in above if "deepspeed.launcher.launch" in process.words), ())
    marks = [word for word in launch if word.startswith(("--world_info=", "--master_port="))]
    known = {1, *(process.pid for process in above)}
    for pid in psutil.pids():
        process = Ancestor.of(pid) if marks and pid not in known else None
        if process is not None and all(mark in " ".join(process.words) for mark in marks):
            yield process


def processes_above() -> Iterator[Ancestor]:
    """Yield the parent of this process, its parent and so on; ends where the system describes no more."""
    for pid in ancestors(os.getpid()):
        if pid == 1 or (process := Ancestor.of(pid)) is None:
            return
        yield process


def missing_hostfile(process: Ancestor) -> str | None:
    """Return the hostfile of a deepspeed launcher if the file does not exist; else None."""
    value = hostfile_of(process.words)
    return value if value is not None and not (process.folder / value).is_file() else None


def hostfile_of(words: Sequence[str]) -> str | None:
    """Return the value of --hostfile before the script in the words of a deepspeed launcher; None without one."""
    if not any(word == "deepspeed.launcher.runner" or Path(word).name == "deepspeed" for word in words[:4]):
        return None
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word in ("--hostfile", "-H"):
            return following
        if word.startswith("--hostfile="):
            return word.partition("=")[2]
        if word.endswith(".py") and word != words[0] and not word.startswith("-") and Path(word).name == "pretrain.py":
            return None
    return None


def exposed(words: Iterable[str], environment: Mapping[str, str]) -> list[str]:
    """Return the names of secret variables whose values are in the arguments of a process."""
    text = "\0".join(words)
    return [name for name, value in secrets_of(environment).items() if value in text]
