"""The ranks' meeting before their process group: who does not come is named, within a time that can be set.

Left to itself a group that lacks one rank waits for the timeout of its collectives, and says how many have come, but
not who is missing. Here every rank notes in the store of the launcher's address that it has come; rank 0 sees when all
have, and whoever waits too long names the missing to all. In one process the group's own store later finds the port in
use and shares it (`multi_tenant`).
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta

import torch.distributed

from data_prep.errors import UserError
from trainer.settings.training import DistributedSettings

LOST_RANK_EXIT_STATUS = 76
"""A rank was lost or hung (EX_PROTOCOL of sysexits.h): the same command goes on from the last checkpoint."""

_PREFIX = "clozeworks/meeting"
_LOOK_SECONDS = 0.2
_HEARING_SECONDS = 2.0
_NAMED = 16


class RankIsMissing(UserError):
    """Not every rank came to the meeting."""

    exit_status = LOST_RANK_EXIT_STATUS


def meet(rank: int, world_size: int, settings: DistributedSettings) -> torch.distributed.Store:
    """Wait until all ranks have come; the store must be kept until the group is there.

    Raises:
        RankIsMissing: not all have come within `distributed.meeting_timeout_seconds`.
        UserError: this is rank 0 and the launcher's port is taken.
    """
    deadline = time.monotonic() + settings.meeting_timeout_seconds
    store = _open_store(rank, world_size, settings, deadline)
    try:
        _wait_for_all(store, rank, world_size, settings, deadline)
    except RankIsMissing:
        time.sleep(_HEARING_SECONDS if rank == 0 else 0)  # the others must hear it, and the store may live here
        raise
    except torch.distributed.DistError:
        raise RankIsMissing(
            "rank 0 left before all ranks had met, see its own message; start the same command again"
        ) from None
    return store


def _wait_for_all(
    store: torch.distributed.Store, rank: int, world_size: int, settings: DistributedSettings, deadline: float
) -> None:
    store.set(f"{_PREFIX}/{rank}", "here")
    store.add(f"{_PREFIX}/count", 1)
    while not store.check([f"{_PREFIX}/all"]):
        if rank == 0 and store.add(f"{_PREFIX}/count", 0) >= world_size:
            store.set(f"{_PREFIX}/all", "here")
        elif store.check([f"{_PREFIX}/verdict"]):
            raise RankIsMissing(store.get(f"{_PREFIX}/verdict").decode())
        elif time.monotonic() > deadline:
            missing = [other for other in range(world_size) if not store.check([f"{_PREFIX}/{other}"])]
            verdict = _missing(missing, world_size, settings.meeting_timeout_seconds)
            store.set(f"{_PREFIX}/verdict", verdict)
            raise RankIsMissing(verdict)
        else:
            time.sleep(_LOOK_SECONDS)


def _open_store(
    rank: int, world_size: int, settings: DistributedSettings, deadline: float
) -> torch.distributed.TCPStore:
    """The store at the launcher's address, which rank 0 keeps unless torchrun's agent does."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    # Looked for in Python at first: torch's client would write its stacks to the log while it waits.
    while not keeps and not _answers(address, port):
        if time.monotonic() > deadline:
            raise RankIsMissing(
                f"rank 0 does not answer at {address}:{port} within "
                f"distributed.meeting_timeout_seconds={settings.meeting_timeout_seconds}: it ended before (see its own "
                "message), or this host cannot reach it; start the same command again"
            )
        time.sleep(_LOOK_SECONDS)
    timeout = timedelta(seconds=settings.meeting_timeout_seconds)
    try:
        return torch.distributed.TCPStore(
            address, port, world_size, is_master=keeps, timeout=timeout, wait_for_workers=False, multi_tenant=keeps
        )
    except torch.distributed.DistError as error:
        if keeps and "in use" in str(error):
            raise UserError(
                f"port {port} of {address} is taken, as by another run on this host; give the launcher another "
                "--master_port"
            ) from None
        raise


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=5).close()
    except OSError:
        return False
    return True


def _missing(ranks: list[int], world_size: int, timeout_seconds: int) -> str:
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return (
        f"rank {', '.join(map(str, ranks[:_NAMED]))}{more} of {world_size} did not come within "
        f"distributed.meeting_timeout_seconds={timeout_seconds}: ended before (see its own message), or its host is "
        "not there; start the same command again"
    )
