"""Stop requests by signals, and their exchange between the micro-batches of an evaluation."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.threaded_ranks import ThreadedRanks
from trainer.distributed import process_group, stop_signal
from trainer.distributed.process_group import Ranks
from trainer.distributed.stop_signal import REPEAT_SECONDS, STOPPED_EXIT_STATUS, StopPoll, StopSignal, describe_requests

SELF = f"rank 0 ({socket.gethostname()})"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class Left(Exception):
    """The process would have ended here."""


left: list[int] = []
"""The exit statuses that this process would have ended with."""
judged: list[float] = []
"""When the clock was read: after the first signal, once for each other that is weighed as a second one."""


@pytest.fixture
def clock(monkeypatch):
    """A clock to set, the handlers of before put back, and no end of the test process."""
    left.clear(), judged.clear()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # pytest itself may run under nohup
    now = [1000.0]
    monkeypatch.setattr(stop_signal, "time", SimpleNamespace(monotonic=lambda: judged.append(now[0]) or now[0]))

    def leave(status: int) -> None:
        left.append(status)
        if threading.current_thread() is threading.main_thread():
            raise Left(status)

    monkeypatch.setattr(stop_signal.os, "_exit", leave)
    yield now
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


def until(heard) -> bool:
    """Whether it comes true while the listening thread is at it."""
    for _ in range(6000):  # two minutes: a loaded machine is slow
        if heard():
            return True
        sleep(0.02)
    return False


def after_the_meeting() -> StopSignal:
    stop = StopSignal()
    stop.can_save()
    return stop


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_asks_for_a_stop(clock, number):
    stop = after_the_meeting()
    assert not stop.is_requested
    os.kill(os.getpid(), number)
    assert until(lambda: stop.is_requested) and stop.request == f"{SELF}: {signal.Signals(number).name}"


def test_under_nohup_a_terminal_that_closes_stops_nothing(clock):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = after_the_meeting()
    os.kill(os.getpid(), signal.SIGHUP)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert until(lambda: stop.is_requested) and stop.request == f"{SELF}: SIGUSR1"


def test_the_loss_of_the_launcher_asks_for_a_stop(clock, monkeypatch):
    told = []
    monkeypatch.setattr(stop_signal, "watch_launcher", told.append)
    stop = after_the_meeting()
    assert stop.request is None
    told[0]()
    assert stop.is_requested and stop.request == f"{SELF}: its launcher was lost"


def test_a_launcher_that_passes_ctrl_c_on_asks_no_second_time(clock):
    stop = after_the_meeting()
    os.kill(os.getpid(), signal.SIGINT)
    assert until(lambda: stop.is_requested)
    clock[0] += REPEAT_SECONDS / 2
    os.kill(os.getpid(), signal.SIGTERM)
    assert until(lambda: judged[1:] == [clock[0]])
    clock[0] += REPEAT_SECONDS
    os.kill(os.getpid(), signal.SIGINT)
    assert until(lambda: left) and left[0] == 128 + signal.SIGINT, "the thread that hears them goes one by one"


def test_a_second_signal_ends_the_process_at_once(clock):
    stop = after_the_meeting()
    os.kill(os.getpid(), signal.SIGINT)
    assert until(lambda: stop.is_requested)
    clock[0] += REPEAT_SECONDS + 0.1
    os.kill(os.getpid(), signal.SIGTERM)
    assert until(lambda: left == [128 + signal.SIGTERM])


def test_a_terminal_that_closes_during_a_stop_does_not_end_it(clock):
    stop = after_the_meeting()
    os.kill(os.getpid(), signal.SIGINT)
    assert until(lambda: stop.is_requested)
    clock[0] += REPEAT_SECONDS + 0.1
    os.kill(os.getpid(), signal.SIGHUP)
    os.kill(os.getpid(), signal.SIGINT)
    assert until(lambda: left == [128 + signal.SIGINT]), "which is heard after it"
    assert stop.request == f"{SELF}: SIGINT"


def test_a_second_signal_has_the_end_noted_but_does_not_wait_for_a_disk_that_hangs(clock, capfd, monkeypatch):
    monkeypatch.setattr(stop_signal, "FORCED_END_SECONDS", 0.1)
    stop, noted, never = after_the_meeting(), [], threading.Event()
    stop.on_forced_end = lambda cause: noted.append(cause) or never.wait()
    os.kill(os.getpid(), signal.SIGINT)
    assert until(lambda: stop.is_requested)
    clock[0] += REPEAT_SECONDS + 0.1
    os.kill(os.getpid(), signal.SIGTERM)
    assert until(lambda: left == [128 + signal.SIGTERM])
    never.set()
    assert noted == [f"{SELF}: a second signal, SIGTERM"] and f"ended by {noted[0]}; rerun" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("requests", "described"),
    [
        ([None, "rank 1 (b): its launcher was lost"], "rank 1 (b): its launcher was lost"),
        (["rank 0 (a): SIGTERM", None, "rank 2 (b): SIGINT"], "rank 0 (a): SIGTERM, rank 2 (b): SIGINT"),
        (["w", "x", "y", "z"], "w, x, y and 1 more rank"),
    ],
)
def test_a_stop_names_all_that_asked_or_the_first_of_many(requests, described):
    assert describe_requests(requests) == described


@pytest.mark.parametrize("number", SIGNALS)
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
    cause = f"{SELF}: {signal.Signals(number).name}"
    assert said.count(f"stopped by {cause} before the first step; nothing to save") == 1


def test_before_the_ranks_have_met_the_loss_of_the_launcher_ends_the_process(clock, monkeypatch):
    told = []
    monkeypatch.setattr(stop_signal, "watch_launcher", told.append)
    StopSignal()
    with pytest.raises(Left, match=str(STOPPED_EXIT_STATUS)):
        told[0]()


def test_a_signal_that_comes_while_the_handlers_are_set_is_heard(clock, monkeypatch):
    set_handler = signal.signal

    def set_and_send(number, handler):
        set_handler(number, handler)
        if number == signal.SIGTERM:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(stop_signal.signal, "signal", set_and_send)
        StopSignal()
    assert until(lambda: left == [STOPPED_EXIT_STATUS])


def test_a_signal_to_a_forked_child_is_not_this_process_s(clock):
    stop = after_the_meeting()
    if (child := os.fork()) == 0:
        os.kill(os.getpid(), signal.SIGUSR1)
        signal.set_wakeup_fd(-1)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    os.kill(os.getpid(), signal.SIGTERM)
    assert until(lambda: stop.is_requested) and stop.request == f"{SELF}: SIGTERM", (
        "the child's would have been heard before"
    )


WAITS_OUTSIDE_PYTHON = """
import ctypes, threading, time
from trainer.distributed import stop_signal
stop_signal.REPEAT_SECONDS = 0.3
stop = stop_signal.StopSignal()
stop.can_save()
def tell():
    while not stop.is_requested:
        time.sleep(0.01)
    print("asked", flush=True)
threading.Thread(target=tell, daemon=True).start()
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(mutex)
print("waiting", flush=True)
libc.pthread_mutex_lock(mutex)  # for ever, and no signal wakes it
"""


@pytest.mark.spawn
def test_a_second_signal_ends_a_rank_that_waits_for_another_outside_python():
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    command = [sys.executable, "-c", WAITS_OUTSIDE_PYTHON]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "waiting\n"
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == "asked\n"
            sleep(0.5)  # from then on it is a second one
            process.send_signal(signal.SIGTERM)  # once: a traced thread of Python 3.11 spins while more arrive
            assert process.wait(timeout=120) == 128 + signal.SIGTERM
        finally:
            process.kill()  # else leaving the block would wait for it


ALONE = Ranks(0, 1, 0, torch.device("cpu"))


def no_request() -> Any:
    return SimpleNamespace(is_requested=False)


def test_one_rank_hears_of_its_request_at_the_next_call_and_stays_with_it() -> None:
    request = no_request()
    poll = StopPoll(request, ALONE)
    assert not poll() and not poll.is_agreed
    request.is_requested = True
    assert poll() and poll.is_agreed
    request.is_requested = False
    assert poll(), "what is incomplete was dropped"


@pytest.mark.parametrize(
    ("seconds", "most_calls", "latest"),
    [(10.0, stop_signal.MOST_CALLS, 1), (0.001, stop_signal.MOST_CALLS, 2 * stop_signal.MOST_CALLS), (0.001, 1, 0)],
)
def test_all_ranks_leave_at_the_same_call_and_sooner_where_calls_take_long(
    seconds: float, most_calls: int, latest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(stop_signal, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    together = ThreadedRanks(3, (), monkeypatch)

    monkeypatch.setattr(process_group, "begin_sum_on_hosts", together.begin_sum_on_hosts)

    def calls_until_stop(ranks: Ranks) -> int:
        request = no_request()
        poll = StopPoll(request, ranks, most_calls)
        for number in range(100):
            if ranks.is_first:
                clock[0] += seconds
            request.is_requested = ranks.rank == 2 and number >= 20
            if poll():
                return number
        raise AssertionError("no rank left")

    left = together.run(calls_until_stop)
    assert len(set(left)) == 1 and 20 <= left[0] <= 20 + latest


def test_a_call_waits_for_the_sum_that_the_call_before_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    def begin(values: torch.Tensor, ranks: Ranks) -> Callable[[], torch.Tensor]:
        happened.append("begin")
        return lambda: happened.append("wait") or values  # type: ignore[func-returns-value]

    monkeypatch.setattr(process_group, "begin_sum_on_hosts", begin)
    poll = StopPoll(no_request(), Ranks(0, 2, 0, torch.device("cpu")))
    poll()
    assert happened == ["begin"]
    poll()
    assert happened == ["begin", "wait", "begin"]
    poll.conclude()
    assert happened[3:] == ["wait", "begin", "wait"]
