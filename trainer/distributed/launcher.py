"""Watch of the launcher that started this rank.

A rank whose launcher was killed is an orphan: it receives no stop signal, and its exit status is lost. DeepSpeed's
launcher on one node is two processes: a signal to the upper one leaves the lower one waiting for the ranks, so both
are watched. If the rank was started by ssh (several nodes, or another node than the launcher's), pdsh, ssh and a shell
are between the two; those on this host are watched as well. A process without a launcher (plain `python`, also under
nohup) has nothing to watch.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

_LOOK_SECONDS = 1.0


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
