"""A polite request to stop: SIGTERM, SIGINT, SIGUSR1 or SIGHUP asks for a checkpoint, a second one ends at once.

A SIGHUP that is ignored already, as under nohup, stays so. The loss of the launcher asks for a checkpoint too
(`trainer/distributed/launcher.py`). Until the ranks have their group the first signal ends the process: there is
nothing to save, and a rank whose peer is lost would wait for it. A rank waits for another outside Python, at the
meeting as in a collective, where no handler runs; so the interpreter writes the signal's number to a pipe, and a thread
reads it and judges.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence

from data_prep.base.terminal import counted
from trainer.distributed.launcher import watch_launcher

STOPPED_EXIT_STATUS = 75
"""Saved and left on a signal (EX_TEMPFAIL of sysexits.h): start the same command again."""

REPEAT_SECONDS = 2.0
"""Within these a signal is the first one again: on Ctrl-C a terminal signals launcher and ranks alike, and the launcher
(deepspeed, torchrun) passes it on to the ranks once more, as SIGTERM."""

FORCED_END_SECONDS = 2.0
"""How long a second signal waits for the end of the run to be noted on a disk that may hang."""

_NAMED = 3
_NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class StopSignal:
    """Whether this process was asked to stop; all ranks then agree on the step in `trainer/loop/step.py`.

    Made in the main thread as early as possible; `group_ready` once they can agree.
    """

    def __init__(self) -> None:
        self.asked = False
        self.request: str | None = None
        """Who asked and why, where it is this rank: "rank 1 (host-b): its launcher was lost"."""
        self.cause = "a signal to another rank"
        """Who asked of all ranks, once they have agreed (`describe_requests`)."""
        self.on_forced_end: Callable[[str], None] | None = None
        """Called with the cause when a second signal ends the process; it gets `FORCED_END_SECONDS`."""
        self._name = f"rank {os.environ.get('RANK', '0')} ({socket.gethostname()})"
        self._asked_at = 0.0
        self._is_alone = True
        self._leaving = threading.Lock()  # taken by the first of the threads that hear of a signal and of a loss
        self._stderr: int | None = None
        with contextlib.suppress(OSError):  # a process may have no standard error
            self._stderr = os.dup(2)  # deepspeed sends its own to nowhere while it looks what can be compiled
        reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        threading.Thread(target=self._read, args=(reading,), name="stop-signal", daemon=True).start()
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)  # first, or a signal would be lost between
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a child's signals are not this process's
        for number in _NUMBERS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # under nohup
            signal.signal(number, lambda *_: None)  # the number of a signal without a handler is not written
        watch_launcher(lambda: self._ask("its launcher was lost"))

    def group_ready(self) -> None:
        """From here on a request is granted after the next step, by all ranks together."""
        self._is_alone = False

    def _ask(self, cause: str) -> None:
        if self._is_alone:
            self._leave(cause)
        if not self.asked:
            self._asked_at, self.request = time.monotonic(), f"{self._name}: {cause}"
            self.asked = True  # last: other threads look at it

    def _read(self, reading: int) -> None:
        while written := os.read(reading, 1):
            number = written[0]
            if number not in _NUMBERS:
                continue
            if self.asked and time.monotonic() - self._asked_at > REPEAT_SECONDS:
                self._end_at_once(number)
            self._ask(signal.Signals(number).name)

    def _end_at_once(self, number: int) -> None:
        cause = f"{self._name}: a second signal, {signal.Signals(number).name}"
        if (on_forced_end := self.on_forced_end) is not None:
            thread = threading.Thread(target=on_forced_end, args=(cause,), daemon=True)
            thread.start()
            thread.join(FORCED_END_SECONDS)
        self._say(f"ended by {cause}; rerun the same command to resume\n")
        os._exit(128 + number)

    def _leave(self, cause: str) -> None:
        if not self._leaving.acquire(blocking=False):
            return
        if os.environ.get("LOCAL_RANK", "0") == "0":
            self._say(
                f"stopped by {self._name}: {cause} before the first step: there is nothing to save, and the same "
                "command goes on\n"
            )
        os._exit(STOPPED_EXIT_STATUS)

    def _say(self, text: str) -> None:
        if self._stderr is not None:
            with contextlib.suppress(OSError):  # not `print`, in which a signal may have come; its reader may be gone
                os.write(self._stderr, text.encode())


def describe_requests(requests: Sequence[str | None]) -> str:
    """Who asked for a stop and why, of what each rank has as its `request`, in the order of ranks."""
    asked = [request for request in requests if request is not None]
    more = f" and {counted(len(asked) - _NAMED, 'more rank')}" if len(asked) > _NAMED else ""
    return ", ".join(asked[:_NAMED]) + more
