"""Stopping on a signal: told in one line, with the status that a shell expects, and the handlers put back."""

from __future__ import annotations

import os
import signal

import pytest

from data_prep.commands.shards import stopping_on_signals
from tests.support.data_prep_command import as_command


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_command_with_one_line(number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    given_back = []

    def command() -> None:
        with stopping_on_signals():
            try:
                os.kill(os.getpid(), number)
                raise AssertionError("the signal came too late")
            finally:
                given_back.append("lock")

    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as ended:
            as_command(command)
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert ended.value.code == 128 + number and given_back == ["lock"]
    assert capsys.readouterr().err == "stopped; rerun the same command, without --fresh, to resume\n"


def test_an_ignored_signal_stays_ignored() -> None:
    """As SIGHUP is under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopping_on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
