"""Asking for a stop between the micro-batches of an evaluation, on one rank and on several."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.threaded_ranks import ThreadedRanks
from trainer.distributed import process_group, stop_signal
from trainer.distributed.process_group import Ranks
from trainer.distributed.stop_signal import StopPoll

ALONE = Ranks(0, 1, 0, torch.device("cpu"))


def signal() -> Any:
    return SimpleNamespace(is_requested=False)


def test_one_rank_hears_of_its_request_at_the_next_call_and_stays_with_it() -> None:
    request = signal()
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
        request = signal()
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
    poll = StopPoll(signal(), Ranks(0, 2, 0, torch.device("cpu")))
    poll()
    assert happened == ["begin"]
    poll()
    assert happened == ["begin", "wait", "begin"]
    poll.conclude()
    assert happened[3:] == ["wait", "begin", "wait"]
