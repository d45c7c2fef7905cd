"""A request to stop: the first SIGTERM, SIGINT or SIGUSR1 asks for a checkpoint, the second ends the process."""

from __future__ import annotations

import os
import signal
from types import FrameType

STOPPED_EXIT_STATUS = 75
"""Saved and left on a signal (EX_TEMPFAIL of sysexits.h): start the same command again."""


class StopSignal:
    """Whether this process was asked to stop; all ranks then agree on the step in `trainer/step.py`."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            os._exit(128 + number)
        self.asked = True
