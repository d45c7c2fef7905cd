"""Sums of a few integers over all ranks, which their hosts add up while the devices work.

Rank 0 gathers the numbers of all ranks and broadcasts their sum: with 512 ranks 10 hops (1, and 9 of gloo's tree) where
a ring takes 1,022. gloo's own threads do both, and a thread of Python adds between them on rank 0 alone: a rank that
launches kernels often keeps Python's lock for 5 ms. Sums of integers are exact in any order. Only the work of gloo's
threads on rank 0, which receive a message of each rank, grows with the number of ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch.distributed import BroadcastOptions, GatherOptions

from trainer.distributed.process_group import Ranks


def begin_sum_on_hosts(values: torch.Tensor, ranks: Ranks) -> Callable[[], torch.Tensor]:
    """Begin to sum a CPU tensor in other threads, and return a function that waits for the sum; `values` is unchanged.

    All ranks begin their sums in one order; any number may run at once. The function raises errors of the network.
    """
    total = values.clone()
    if ranks.world_size == 1:
        return lambda: total
    group = ranks.host_group
    assert group is not None, "several ranks"
    if ranks.is_first:
        return _begin_on_first(total, ranks)
    gathered = group.gather([], [total.clone()], GatherOptions())
    received = group.broadcast([total], BroadcastOptions())

    def wait() -> torch.Tensor:
        gathered.wait()
        received.wait()
        return total

    return wait


def _begin_on_first(total: torch.Tensor, ranks: Ranks) -> Callable[[], torch.Tensor]:
    group, future, before = ranks.host_group, Future[torch.Tensor](), list(ranks.last_sum)
    assert group is not None
    ranks.last_sum[:] = [future]

    def add_up() -> None:
        for earlier in before:  # so that rank 0 gathers and broadcasts in the order in which the others do
            earlier.exception()
        try:
            parts = total.new_empty((ranks.world_size, *total.shape))
            group.gather([list(parts)], [total], GatherOptions()).wait()
            torch.sum(parts, 0, out=total)
            group.broadcast([total], BroadcastOptions()).wait()
            future.set_result(total)
        except BaseException as error:  # noqa: BLE001 - it is of whoever waits
            future.set_exception(error)

    # A daemon: a process that ends must not wait for a rank that is lost.
    threading.Thread(target=add_up, name="sum", daemon=True).start()
    return future.result
