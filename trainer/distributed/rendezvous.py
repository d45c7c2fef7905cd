"""Rendezvous of all ranks before their process group: missing ranks are listed, within a configurable time.

Each rank first connects to the launcher's address: a name that does not resolve and a host that does not answer are
retried for `distributed.connect_timeout_seconds`.

torch's own rendezvous waits for the timeout of its collectives, and reports how many ranks have come, but not which
are missing. Here every rank registers in the store at the launcher's address; rank 0 sees when all have, and a rank
that waits too long lists the missing ones for all. In one process the group's own store later finds the port in use
and shares it (`multi_tenant`).
"""

from __future__ import annotations

import os
import socket
import threading
import time
from datetime import timedelta

import torch.distributed

from data_prep.base.errors import UserError
from trainer.config.training_settings import DistributedSettings
from trainer.distributed.interface import common_peer, interface_towards, source_address

LOST_RANK_EXIT_STATUS = 76
"""A rank crashed or hung (EX_PROTOCOL of sysexits.h): the same command resumes from the last checkpoint."""

_PREFIX = "clozeworks/meeting"
_KEEPER = f"{_PREFIX}/keeper"
_LOOK_SECONDS = 0.2
_CONNECT_SECONDS = 5.0
_HEARING_SECONDS = 2.0
_NAMED = 16


class RankIsMissing(UserError):
    """Not all ranks joined the run."""

    exit_status = LOST_RANK_EXIT_STATUS

    def __init__(self, problem: str) -> None:
        super().__init__(problem, code="rank-missing")


def meet(rank: int, world_size: int, settings: DistributedSettings) -> torch.distributed.Store:
    """Wait until all ranks have come; the store must be kept until the group is there.

    Raises:
        RankIsMissing: the launcher's address was not reached within `distributed.connect_timeout_seconds`, or not all
            have come within `distributed.meeting_timeout_seconds`.
        UserError: this is rank 0 and the launcher's port is taken.
    """
    deadline = time.monotonic() + settings.meeting_timeout_seconds
    store = _open_store(rank, world_size, settings)
    try:
        _wait_for_all(store, rank, world_size, settings, deadline)
    except RankIsMissing:
        time.sleep(_HEARING_SECONDS if rank == 0 else 0)  # the others must hear it, and the store may live here
        raise
    except torch.distributed.DistError:
        raise RankIsMissing(
            "rank 0 left before all ranks had met, see its own message; rerun the same command"
        ) from None
    return store


def interface_to_others(store: torch.distributed.Store) -> str | None:
    """After `meet`: this host's network interface to the other hosts; None with one host, or where none is found."""
    return interface_towards(os.environ["MASTER_ADDR"], store.get(f"{_PREFIX}/all").decode())


def _wait_for_all(
    store: torch.distributed.Store, rank: int, world_size: int, settings: DistributedSettings, deadline: float
) -> None:
    store.set(f"{_PREFIX}/{rank}", source_address(os.environ["MASTER_ADDR"]))
    store.add(f"{_PREFIX}/count", 1)
    while not store.check([f"{_PREFIX}/all"]):
        if rank == 0 and store.add(f"{_PREFIX}/count", 0) >= world_size:
            addresses = store.multi_get([f"{_PREFIX}/{other}" for other in range(world_size)])
            store.set(f"{_PREFIX}/all", common_peer([address.decode() for address in addresses]))
        elif store.check([f"{_PREFIX}/verdict"]):
            raise RankIsMissing(store.get(f"{_PREFIX}/verdict").decode())
        elif time.monotonic() > deadline:
            missing = [other for other in range(world_size) if not store.check([f"{_PREFIX}/{other}"])]
            verdict = _missing(missing, world_size, settings.meeting_timeout_seconds)
            store.set(f"{_PREFIX}/verdict", verdict)
            raise RankIsMissing(verdict)
        else:
            time.sleep(_LOOK_SECONDS)


def _open_store(rank: int, world_size: int, settings: DistributedSettings) -> torch.distributed.TCPStore:
    """The store at the launcher's address, which rank 0 keeps unless torchrun's agent does."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=settings.meeting_timeout_seconds)
    keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    kept = _keep_store(port, world_size, timeout) if keeps else None
    seconds = min(settings.connect_timeout_seconds, settings.meeting_timeout_seconds)
    # Looked for in Python at first: torch's client prints its stacks while it waits.
    error = wait_for_answer(address, port, seconds)
    joined = _join_store(address, port, world_size, seconds) if error is None else error
    if isinstance(joined, Exception):
        raise RankIsMissing(_unreachable(joined, address, port, seconds, is_own=keeps))
    if kept is not None and not joined.check([_KEEPER]):
        other = RuntimeError("another process's store answers there")
        raise RankIsMissing(_unreachable(other, address, port, seconds, is_own=keeps))
    joined.set_timeout(timeout)
    return kept or joined


def _keep_store(port: int, world_size: int, timeout: timedelta) -> torch.distributed.TCPStore:
    """Rank 0's store, by a name of this host alone: the launcher's may not resolve (yet).

    Raises:
        UserError: the port is taken.
    """
    try:
        store = torch.distributed.TCPStore(
            "localhost", port, world_size, is_master=True, timeout=timeout, wait_for_workers=False, multi_tenant=True
        )
    except torch.distributed.DistError as error:
        if "in use" in str(error):
            raise UserError(
                f"port {port} of {os.environ['MASTER_ADDR']} is in use, maybe by another run on this host",
                fix="give the launcher another --master_port",
                code="port-in-use",
            ) from None
        raise
    store.set(_KEEPER, "here")
    return store


def _join_store(
    address: str, port: int, world_size: int, seconds: float
) -> torch.distributed.TCPStore | RuntimeError | TimeoutError:
    """A client of the store at the address, or why there is none after `seconds`.

    In a thread: where something accepts the connection and is silent, torch's client waits for ever.
    """
    found: list[torch.distributed.TCPStore | RuntimeError] = []

    def connect() -> None:
        limit = timedelta(seconds=seconds)
        try:
            found.append(
                torch.distributed.TCPStore(
                    address, port, world_size, is_master=False, timeout=limit, wait_for_workers=False
                )
            )
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=connect, name="meeting", daemon=True)
    thread.start()
    thread.join(seconds + _CONNECT_SECONDS)
    return found[0] if found else TimeoutError("it accepts the connection and is silent")


def wait_for_answer(address: str, port: int, seconds: float) -> OSError | None:
    """Try for `seconds`, and at least once, to connect to the address; the last error where nobody answers.

    One try may take longer where the resolver of names does.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((address, port), timeout=_CONNECT_SECONDS).close()
            return None
        except OSError as error:
            if time.monotonic() + _LOOK_SECONDS > deadline:
                return error
        time.sleep(_LOOK_SECONDS)


def _unreachable(error: Exception, address: str, port: int, seconds: float, is_own: bool) -> str:
    """What a rank says that did not reach the launcher's address; `is_own` on rank 0, which listens there."""
    within = f"on host {socket.gethostname()} within distributed.connect_timeout_seconds={seconds}"
    again = "rerun the same command; raise the setting where names and hosts appear late"
    if isinstance(error, socket.gaierror):
        return (
            f"MASTER_ADDR={address} did not resolve {within} ({error.strerror}). Fix: give the launcher a name or an "
            f"address of rank 0's host that every host resolves, and {again}"
        )
    reason = (error.strerror if isinstance(error, OSError) else None) or _first_line(error)
    if is_own:
        return (
            f"rank 0 does not reach itself at MASTER_ADDR={address}, port {port}, {within} ({reason}). Fix: give the "
            f"launcher an address of this host, and {again}"
        )
    return (
        f"rank 0 does not answer at {address}:{port} {within} ({reason}): it ended before or has not begun, or this "
        f"host cannot reach it. Fix: see rank 0's own message, check address and port, and {again}"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _missing(ranks: list[int], world_size: int, timeout_seconds: int) -> str:
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return (
        f"rank {', '.join(map(str, ranks[:_NAMED]))}{more} of {world_size} did not join within "
        f"distributed.meeting_timeout_seconds={timeout_seconds}: it ended before (see its own message), or its host is "
        "down. Fix: rerun the same command"
    )
