"""Signals: SIGTERM and SIGHUP stop a command as Ctrl-C does: workers end, locks are released, one line says so."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from data_prep.base.errors import Stopped


@contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise `Stopped` in the block, unless they are ignored (as under nohup) or handled.

    For work that returns to Python every few seconds; the signal waits until then.
    """
    handled = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    for number in handled:
        signal.signal(number, _stop)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)
