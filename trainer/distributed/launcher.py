"""Whether the launcher that started this rank is still there.

A rank whose launcher was killed is an orphan: nobody tells it to stop, and nobody hears its exit status. DeepSpeed's
launcher on one node is two processes, of which a signal to the upper one leaves the lower one waiting for the ranks; so
both are watched there. Where it came by ssh (several nodes, or one that is not the launcher's) there are pdsh, ssh and
a shell between the two: what of them is on this host is watched as well. A process without a launcher (plain `python`,
also under nohup) has nobody to lose.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import psutil

_LOOK_SECONDS = 1.0


def watch_launcher(on_loss: Callable[[], None]) -> None:
    """Call `on_loss` once, from a thread of its own, when the launcher of this rank is gone."""
    levels = launcher_levels()
    if levels:
        line = (os.getpid(), *ancestors(levels))
        links = list(zip(line, line[1:], strict=False))
        if "CROSS_SIZE" in os.environ and (levels == 1 or came_by_ssh(_words_of(line[-1]))):
            links += remote_links(line[1])
        threading.Thread(target=_look, args=(links, on_loss), name="launcher-watch", daemon=True).start()


def remote_links(launch: int) -> list[tuple[int, int]]:
    """Of a start on several nodes, the pairs of a process and its parent that must stay, where they are on this host.

    From launch.py (its process id is `launch`) up to the ssh session; and the pdsh that began it, with the launcher.
    """
    links, current = [], launch
    while (above := _parent_of(current)) > 1:
        links.append((current, above))
        if "".join(_words_of(above)[:1]).startswith("sshd"):
            break
        current = above
    else:
        links = []  # not by ssh
    marks = {word for word in _words_of(launch) if word.startswith(("--world_info=", "--master_port="))}
    starters = [number for number in psutil.pids() if Path((_words_of(number) or [""])[0]).name == "pdsh"]
    return links + [(each, _parent_of(each)) for each in starters if marks and marks <= set(_words_of(each))]


def came_by_ssh(words: list[str]) -> bool:
    """Whether the parent of launch.py, of which these are the words, is what pdsh's ssh starts: a shell, or sshd."""
    return "".join(words[:1]).startswith("sshd") or any("deepspeed.launcher.launch " in word for word in words)


def launcher_levels() -> int:
    """How many of this process's ancestors are the launcher, by the environment that launchers set."""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun
        return 1
    if "CROSS_SIZE" in os.environ:  # deepspeed; between its halves on several nodes there are ssh and shells
        return 2 if os.environ["CROSS_SIZE"] == "1" else 1
    return 0


def ancestors(levels: int) -> tuple[int, ...]:
    """The parent's process id, its parent's and so on; fewer than `levels` where the system does not tell."""
    found: list[int] = []
    current = os.getppid()
    while len(found) < levels and current > 0:
        found.append(current)
        current = _parent_of(current)
    return tuple(found)


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
