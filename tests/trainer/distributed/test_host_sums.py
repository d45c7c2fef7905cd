"""Sums over ranks by their hosts, among threads that have real groups of gloo."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, ProcessGroupGloo

from trainer.distributed.exit import reports_lost_peer
from trainer.distributed.process_group import Ranks, begin_sum_on_hosts

PATIENCE = timedelta(seconds=30)


@pytest.fixture
def on_ranks() -> Callable[..., list[Any]]:
    """Call a function on so many ranks, which wait so long for each other, and return what each returns."""

    def call(world_size: int, function: Callable[[Ranks], Any], patience: timedelta = PATIENCE) -> list[Any]:
        store = HashStore()

        def run(rank: int) -> Any:
            options = ProcessGroupGloo._Options()
            options._timeout, options._devices = PATIENCE, [ProcessGroupGloo.create_device(interface="lo")]
            group: Any = ProcessGroupGloo(store, rank, world_size, options)
            group._set_default_timeout(patience)
            return function(Ranks(rank, world_size, 0, torch.device("cpu"), group))

        with ThreadPoolExecutor(world_size) as pool:
            return list(pool.map(run, range(world_size)))

    return call


@pytest.mark.parametrize("world_size", [2, 3, 11])
def test_each_rank_gets_the_sum_of_all(world_size: int, on_ranks: Callable[..., list[Any]]) -> None:
    large = (1 << 53) + 1  # which floating point would round

    def sum_up(ranks: Ranks) -> list[int]:
        own = torch.tensor([ranks.rank, 1, large])
        found = begin_sum_on_hosts(own, ranks)().tolist()
        assert own.tolist() == [ranks.rank, 1, large]
        return found

    expected = [world_size * (world_size - 1) // 2, world_size, world_size * large]
    assert on_ranks(world_size, sum_up) == [expected] * world_size


def test_sums_under_way_are_kept_apart_and_may_be_awaited_in_any_order(on_ranks: Callable[..., list[Any]]) -> None:
    def sum_up(ranks: Ranks) -> list[list[int]]:
        waits = [begin_sum_on_hosts(torch.tensor([number, ranks.rank][: number % 2 + 1]), ranks) for number in range(9)]
        order = range(9) if ranks.rank == 1 else range(8, -1, -1)
        found = {number: waits[number]().tolist() for number in order}
        return [found[number] for number in range(9)]

    assert on_ranks(3, sum_up) == [[[3 * number, 3][: number % 2 + 1] for number in range(9)]] * 3


@pytest.mark.parametrize("lost", [0, 1, 10])
def test_a_rank_that_does_not_come_is_reported_by_all_within_the_limit(
    lost: int, on_ranks: Callable[..., list[Any]]
) -> None:
    """The one that adds, one that passes the sum on, and one that does not."""

    def sum_up(ranks: Ranks) -> str:
        begun_at = time.monotonic()
        if ranks.rank == lost:
            time.sleep(0.8)
            return "timed out"
        with pytest.raises(RuntimeError) as caught:
            begin_sum_on_hosts(torch.tensor([1]), ranks)()
        assert time.monotonic() - begun_at < 20 and reports_lost_peer(str(caught.value)), caught.value
        return "timed out"

    assert on_ranks(11, sum_up, patience=timedelta(seconds=0.5)) == ["timed out"] * 11
