from __future__ import annotations

import contextlib
import os
import signal
import threading
from time import sleep
from types import SimpleNamespace

import pytest

from trainer.ranks import stop_signal
from trainer.ranks.stop_signal import REPEAT_SECONDS, STOPPED_EXIT_STATUS, StopSignal


class Left(Exception):
    """The process would have ended here."""


left: list[int] = []
"""The exit statuses that this process would have ended with."""


@pytest.fixture
def clock(monkeypatch):
    """A clock to set, the handlers of before put back, and no end of the test process."""
    left.clear()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    now = [1000.0]
    monkeypatch.setattr(stop_signal, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def leave(status: int) -> None:
        left.append(status)
        if threading.current_thread() is threading.main_thread():
            raise Left(status)

    monkeypatch.setattr(stop_signal.os, "_exit", leave)
    yield now
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


def after_the_meeting() -> StopSignal:
    stop = StopSignal()
    stop.ranks_have_met()
    return stop


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_asks_for_a_stop(clock, number):
    stop = after_the_meeting()
    assert not stop.asked
    os.kill(os.getpid(), number)
    assert stop.asked and stop.cause == signal.Signals(number).name


def test_the_loss_of_the_launcher_asks_for_a_stop(clock, monkeypatch):
    told = []
    monkeypatch.setattr(stop_signal, "watch_launcher", told.append)
    stop = after_the_meeting()
    assert stop.cause == "a signal to another rank"
    told[0]()
    assert stop.asked and stop.cause == "the loss of its launcher"


def test_a_launcher_that_passes_ctrl_c_on_asks_no_second_time(clock):
    stop = after_the_meeting()
    os.kill(os.getpid(), signal.SIGINT)
    clock[0] += REPEAT_SECONDS / 2
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.asked


def test_a_second_signal_ends_the_process_at_once(clock):
    after_the_meeting()
    os.kill(os.getpid(), signal.SIGINT)
    clock[0] += REPEAT_SECONDS + 0.1
    with pytest.raises(Left, match=str(128 + signal.SIGTERM)):
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_before_the_ranks_have_met_the_first_signal_ends_the_process(number, clock, capfd):
    StopSignal()
    with contextlib.suppress(Left):  # unless the listening thread is the first
        os.kill(os.getpid(), number)
    for _ in range(500):
        if left:
            break
        sleep(0.02)
    assert left == [STOPPED_EXIT_STATUS]
    said = capfd.readouterr().err
    assert said.count(f"stopped by {signal.Signals(number).name} before the first step: there is nothing") == 1


def test_before_the_ranks_have_met_the_loss_of_the_launcher_ends_the_process(clock, monkeypatch):
    told = []
    monkeypatch.setattr(stop_signal, "watch_launcher", told.append)
    StopSignal()
    with pytest.raises(Left, match=str(STOPPED_EXIT_STATUS)):
        told[0]()


def test_the_thread_that_listens_ends_with_the_meeting(clock):
    def listening() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "stop-signal" and thread not in others]

    others = threading.enumerate()  # of tests before, whose ranks never met
    stop = StopSignal()
    (thread,) = listening()
    stop.ranks_have_met()
    thread.join(timeout=10)
    assert not listening() and signal.set_wakeup_fd(-1) == -1
