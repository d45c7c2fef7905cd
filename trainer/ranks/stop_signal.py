"""A polite request to stop: SIGTERM, SIGINT or SIGUSR1 asks for a checkpoint, a second one ends the process at once.

The loss of the launcher asks for it too (`trainer/ranks/launcher.py`).
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

from trainer.ranks.launcher import watch_launcher

STOPPED_EXIT_STATUS = 75
"""Saved and left on a signal (EX_TEMPFAIL of sysexits.h): start the same command again."""

REPEAT_SECONDS = 2.0
"""Within these a signal is the first one again: on Ctrl-C a terminal signals launcher and ranks alike, and the launcher
(deepspeed, torchrun) passes it on to the ranks once more, as SIGTERM."""


class StopSignal:
    """Whether this process was asked to stop; all ranks then agree on the step in `trainer/step.py`."""

    def __init__(self) -> None:
        self.asked = False
        self.cause = "a signal to another rank"
        """Who asked; as it stands until this rank itself is asked."""
        self._asked_at = 0.0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._handle)
        watch_launcher(lambda: self._ask("the loss of its launcher"))

    def _ask(self, cause: str) -> None:
        if not self.asked:
            self.asked, self.cause, self._asked_at = True, cause, time.monotonic()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked and time.monotonic() - self._asked_at > REPEAT_SECONDS:
            os._exit(128 + number)
        self._ask(signal.Signals(number).name)
