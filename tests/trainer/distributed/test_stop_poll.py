"""Asking for a stop between the micro-batches of an evaluation, on one rank and on several."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.threaded_ranks import ThreadedRanks
from trainer.distributed import stop_poll
from trainer.distributed.process_group import Ranks
from trainer.distributed.stop_poll import StopPoll

ALONE = Ranks(0, 1, 0, torch.device("cpu"))


def signal() -> Any:
    return SimpleNamespace(asked=False)


def test_one_rank_hears_of_its_request_at_the_next_call_and_stays_with_it() -> None:
    request = signal()
    poll = StopPoll(request, ALONE)
    assert not poll() and not poll.asked
    request.asked = True
    assert poll() and poll.asked
    request.asked = False
    assert poll(), "what is incomplete was dropped"


@pytest.mark.parametrize(("seconds", "latest"), [(10.0, 0), (0.001, stop_poll.MOST_CALLS)])
def test_all_ranks_leave_at_the_same_call_as_soon_as_calls_take_long(
    seconds: float, latest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(stop_poll, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    together = ThreadedRanks(3, (), monkeypatch)

    def sum_on_hosts(values: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        return torch.stack(together.gather_objects(values, ranks)).sum(0)

    monkeypatch.setattr(stop_poll, "sum_on_hosts", sum_on_hosts)

    def calls_until_stop(ranks: Ranks) -> int:
        request = signal()
        poll = StopPoll(request, ranks)
        for number in range(100):
            if ranks.is_first:
                clock[0] += seconds
            request.asked = ranks.rank == 2 and number >= 20
            if poll():
                return number
        raise AssertionError("no rank left")

    left = together.run(calls_until_stop)
    assert len(set(left)) == 1 and 20 <= left[0] <= 20 + latest
