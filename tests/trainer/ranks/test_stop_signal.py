from __future__ import annotations

import os
import signal

import pytest

from trainer.ranks import stop_signal
from trainer.ranks.stop_signal import REPEAT_SECONDS, StopSignal


class Left(Exception):
    """The process would have ended here."""


@pytest.fixture
def clock(monkeypatch):
    """A clock to set, the handlers of before put back, and no end of the test process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    now = [1000.0]
    monkeypatch.setattr(stop_signal.time, "monotonic", lambda: now[0])

    def leave(status: int) -> None:
        raise Left(status)

    monkeypatch.setattr(stop_signal.os, "_exit", leave)
    yield now
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_asks_for_a_stop(clock, number):
    stop = StopSignal()
    assert not stop.asked
    os.kill(os.getpid(), number)
    assert stop.asked and stop.cause == signal.Signals(number).name


def test_the_loss_of_the_launcher_asks_for_a_stop(clock, monkeypatch):
    told = []
    monkeypatch.setattr(stop_signal, "watch_launcher", told.append)
    stop = StopSignal()
    assert stop.cause == "a signal to another rank"
    told[0]()
    assert stop.asked and stop.cause == "the loss of its launcher"


def test_a_launcher_that_passes_ctrl_c_on_asks_no_second_time(clock):
    stop = StopSignal()
    os.kill(os.getpid(), signal.SIGINT)
    clock[0] += REPEAT_SECONDS / 2
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.asked


def test_a_second_signal_ends_the_process_at_once(clock):
    StopSignal()
    os.kill(os.getpid(), signal.SIGINT)
    clock[0] += REPEAT_SECONDS + 0.1
    with pytest.raises(Left, match=str(128 + signal.SIGTERM)):
        os.kill(os.getpid(), signal.SIGTERM)
