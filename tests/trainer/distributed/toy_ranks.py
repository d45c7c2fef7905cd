"""What the ranks of `test_process_group.py` do: `python toy_ranks.py MODE`."""

from __future__ import annotations

import os
import sys
import time

import torch

from data_prep.base.errors import UserError
from trainer.config.training_settings import DistributedSettings
from trainer.distributed.exit import run_rank
from trainer.distributed.process_group import (
    Ranks,
    all_agree,
    all_reduce_sum,
    begin_sum_on_hosts,
    broadcast_bytes,
    broadcast_object,
    gather_bytes,
    gather_objects,
    initialize_distributed,
    min_over_ranks,
    set_timeout_on_all_groups,
    shut_down,
)

SETTINGS = DistributedSettings(timeout_seconds=400)


def collectives(ranks: Ranks) -> None:
    rank, world_size = ranks.rank, ranks.world_size
    store = torch.distributed.distributed_c10d._get_default_store()
    assert store.timeout.total_seconds() == SETTINGS.timeout_seconds, "groups that begin later wait as long"
    local = torch.tensor([rank, 1])
    assert all_reduce_sum(local, ranks).tolist() == [sum(range(world_size)), world_size]
    assert local.tolist() == [rank, 1]
    assert min_over_ranks(10 - rank, ranks) == 10 - (world_size - 1)
    assert all_agree(True, ranks) and all_agree(rank == 0, ranks) is (world_size == 1)
    assert gather_objects({"rank": rank}, ranks) == [{"rank": number} for number in range(world_size)]
    assert broadcast_object(f"of {rank}", ranks) == "of 0"
    assert gather_bytes(bytes([rank, 0, 255]), ranks) == [bytes([number, 0, 255]) for number in range(world_size)]
    last = world_size - 1
    assert broadcast_bytes(b"" if rank != last else b"of the last\0", ranks, source=last) == b"of the last\0"
    assert begin_sum_on_hosts(local, ranks)().tolist() == [sum(range(world_size)), world_size]
    assert local.tolist() == [rank, 1]
    group = torch.distributed.new_group()
    set_timeout_on_all_groups(SETTINGS.timeout_seconds)
    backend = group._get_backend(torch.device("cpu"))
    assert backend.options._timeout.total_seconds() == SETTINGS.timeout_seconds, backend.options._timeout


def main() -> int:
    mode = sys.argv[1]
    if mode == "user error before the group":
        raise UserError("the file is missing")
    ranks = initialize_distributed(SETTINGS)
    if mode == "collectives":
        collectives(ranks)
        shut_down(ranks, 75)
    if mode == "user error on all":
        time.sleep(0.3 * ranks.rank)
        raise UserError("the shard is damaged")
    if mode == "user error on one" and ranks.rank == 1:
        raise UserError("this host's disk is gone")
    if mode == "our mistake on one" and ranks.rank == 1:
        raise ZeroDivisionError("a mistake of ours")
    if mode == "killed" and ranks.rank == 1:
        os.kill(os.getpid(), 9)
    all_agree(True, ranks)
    all_agree(True, ranks)
    return 0


if __name__ == "__main__":
    run_rank(main)
