"""A polite request to stop: SIGTERM, SIGINT or SIGUSR1 asks for a checkpoint, a second one ends the process at once."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

STOPPED_EXIT_STATUS = 75
"""Saved and left on a signal (EX_TEMPFAIL of sysexits.h): start the same command again."""

REPEAT_SECONDS = 2.0
"""Within these a signal is the first one again: on Ctrl-C a terminal signals launcher and ranks alike, and the launcher
(deepspeed, torchrun) passes it on to the ranks once more, as SIGTERM."""


class StopSignal:
    """Whether this process was asked to stop; all ranks then agree on the step in `trainer/step.py`."""

    def __init__(self) -> None:
        self.asked = False
        self._asked_at = 0.0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.asked:
            self.asked, self._asked_at = True, now
        elif now - self._asked_at > REPEAT_SECONDS:
            os._exit(128 + number)
