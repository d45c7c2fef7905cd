"""Processes that end with the one that started them: a rank, DeepSpeed's pdsh, and processes beside a rank.

A rank whose launcher was killed is an orphan: it receives no stop signal, and its exit status is lost. DeepSpeed's
launcher on one node is two processes: a signal to the upper one leaves the lower one waiting for the ranks, so both
are watched. If the rank was started by ssh (several nodes, or another node than the launcher's), pdsh, ssh and a shell
are between the two; those on this host are watched as well. A process without a launcher (plain `python`, also under
nohup) has nothing to watch.

`python -m trainer.distributed.launcher`, which `clozeworks nodes` starts, is DeepSpeed's launcher with two changes. Its
pdsh ends with it: by default pdsh outlives its launcher, also after SIGKILL, and a launcher on a login node, where no
rank notices that, would leave a run behind that cannot be stopped from there. And its exit status says that a host was
lost.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil

from data_prep.base.known_secrets import hide_secrets

_LOOK_SECONDS = 1.0
_LONGEST_REASON = 500
SSH_FAILED = 255
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>


def watch_launcher(on_loss: Callable[[], None]) -> None:
    """Call `on_loss` once, from a separate thread, when the launcher of this rank has ended."""
    levels = launcher_levels()
    if levels:
        line = (os.getpid(), *itertools.islice(ancestors(os.getpid()), levels))
        links = list(itertools.pairwise(line))
        if "CROSS_SIZE" in os.environ and (levels == 1 or came_by_ssh(_words_of(line[-1]))):
            links += remote_links(line[1])
        threading.Thread(target=_look, args=(links, on_loss), name="launcher-watch", daemon=True).start()


def remote_links(launch: int) -> list[tuple[int, int]]:
    """Return the pairs (process, parent) on this host that must stay, for a start on several nodes.

    They range from launch.py (its process id is `launch`) up to the ssh session, and include the pdsh that started it.
    """
    line = [launch]
    for above in itertools.takewhile(lambda each: each > 1, ancestors(launch)):
        line.append(above)
        if "".join(_words_of(above)[:1]).startswith("sshd"):
            break
    else:
        line = []  # not by ssh
    marks = {word for word in _words_of(launch) if word.startswith(("--world_info=", "--master_port="))}
    starters = [number for number in psutil.pids() if Path((_words_of(number) or [""])[0]).name == "pdsh"]
    starters = [each for each in starters if marks and marks <= set(_words_of(each))]
    return [*itertools.pairwise(line), *((each, _parent_of(each)) for each in starters)]


def came_by_ssh(words: list[str]) -> bool:
    """Return whether pdsh's ssh started the parent of launch.py, a shell or sshd with this command line."""
    return "".join(words[:1]).startswith("sshd") or any("deepspeed.launcher.launch " in word for word in words)


def launcher_levels() -> int:
    """Return how many ancestors of this process belong to the launcher, from the environment that launchers set."""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun
        return 1
    if "CROSS_SIZE" in os.environ:  # deepspeed; between its halves on several nodes there are ssh and shells
        return 2 if os.environ["CROSS_SIZE"] == "1" else 1
    return 0


def ancestors(process: int) -> Iterator[int]:
    """Yield the process ids of the parent, its parent and so on; ends early if the system hides one."""
    while (process := _parent_of(process)) > 0:
        yield process


def _parent_of(process: int) -> int:
    try:
        return psutil.Process(process).ppid()
    except psutil.Error:
        return 0


def _words_of(process: int) -> list[str]:
    try:
        return psutil.Process(process).cmdline()
    except psutil.Error:
        return []


def _look(links: list[tuple[int, int]], on_loss: Callable[[], None]) -> None:
    never = threading.Event()
    while all(_parent_of(child) == parent for child, parent in links):
        never.wait(_LOOK_SECONDS)
    on_loss()


def failure_reason(returncode: int, stderr: str, name: str) -> str:
    """Return the problem that a failed process reported, or how it ended; without the fix, which is for a command."""
    if returncode >= 0:
        text = hide_secrets(stderr.strip())
        text = text[text.rfind("error: ") :] if "error: " in text else text
        reason = text.removeprefix("error: ").partition(". Fix: ")[0]
        return reason[-_LONGEST_REASON:] or f"the {name} process exited with status {returncode}"
    signal_name = next((each.name for each in signal.Signals if each == -returncode), f"signal {-returncode}")
    return f"the {name} process was killed by {signal_name}"


def end_with_parent(parent: int | None = None) -> None:
    """Make Linux send this process SIGTERM when its parent ends, also after an exec.

    Linux only watches from now on: `parent` is the process id of the parent, if it may have ended already. For Linux
    the parent is the thread that started this process, which has to stay as long.
    """
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Run DeepSpeed's launcher with the arguments of this process."""
    from deepspeed.launcher import runner

    from trainer.distributed.rendezvous import LOST_RANK_EXIT_STATUS

    # deepspeed 0.19.8 has no setting for it. The launcher starts pdsh with `subprocess.Popen(command, env=...)`.
    start = functools.partial(subprocess.Popen, preexec_fn=end_with_parent)
    runner.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": start})
    try:
        runner.main()
    except SystemExit as ended:  # with the largest status of all hosts
        if ended.code == SSH_FAILED:
            raise SystemExit(LOST_RANK_EXIT_STATUS) from None
        raise


if __name__ == "__main__":
    main()
