"""Stopping on a signal as on Ctrl-C: workers end, locks are given back, and one line says that the work can go on."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from data_prep.base.errors import Stopped


@contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Have SIGTERM and SIGHUP raise `Stopped` in the block, but where they are ignored (as under nohup) or handled.

    For work that comes back to Python every few seconds; the signal waits until then.
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
