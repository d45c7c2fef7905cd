"""Rendezvous of all ranks before their process group: missing ranks are listed, within a configurable time.

Each rank first connects to the launcher's address: a name that does not resolve and a host that does not answer are
retried for `distributed.connect_timeout_seconds`.

torch's own rendezvous waits for the timeout of its collectives and reports how many ranks joined, but not which are
missing. Here every rank registers in the store at the launcher's address. Rank 0 publishes that all have joined; a
rank whose wait times out lists the missing ranks for all. The store of the process group later finds the port in use
in the same process and shares it (`multi_tenant`).

The ranks also learn the network interface between their hosts. By default gloo offers the address to which the host's
name resolves. On many systems that is 127.0.1.1, to which no other host can connect. The route to the launcher's
address yields a better one.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TypeVar

import psutil
import torch.distributed

from data_prep.base.errors import UserError
from trainer.config.training_settings import DistributedSettings

LOST_RANK_EXIT_STATUS = 76
"""A rank crashed or hung (EX_PROTOCOL of sysexits.h): the same command resumes from the last checkpoint."""

Name = TypeVar("Name", str, int)
NONE = "none"
"""Stands for a missing address."""

_TOPIC = "meeting"
_OWNER, _ALL_JOINED, _FAILURE = "keeper", "all", "failure"
"""Names on the board besides the numbers of ranks, under which ranks post their addresses."""
_POLL_SECONDS = 0.2
_BOARD_POLL_SECONDS = 0.05
_CONNECT_SECONDS = 5.0
_FAILURE_SECONDS = 2.0
"""How long rank 0 keeps its store after a failure, so that the other ranks can read it."""
_MAX_LISTED = 16


class RankIsMissing(UserError):
    """Not all ranks joined the run."""

    exit_status = LOST_RANK_EXIT_STATUS

    def __init__(self, problem: str, *, fix: str, code: str = "rank-missing") -> None:
        super().__init__(problem, fix=fix, code=code)


class Board:
    """Texts of one topic by name, such as a rank, in the store at the launcher's address.

    A text may be replaced by a newer one, and none is removed. Every method raises a `RuntimeError` of torch if the
    store's owner is gone.
    """

    def __init__(self, store: torch.distributed.Store, topic: str) -> None:
        self._store, self._topic = store, topic
        self._seen: set[str] = set()

    def post(self, name: str | int, text: str) -> None:
        """Post a text for all ranks."""
        self._store.set(self._key(name), text)

    def post_first(self, name: str | int, text: str) -> None:
        """Post a text unless there is one of this name."""
        self._store.compare_set(self._key(name), "", text)

    def read(self, name: str | int) -> str | None:
        """Return the text of this name; None if no rank has posted it."""
        key = self._key(name)
        return self._store.get(key).decode() if self._is_there(key) else None

    def read_all(self, names: Iterable[Name]) -> dict[Name, str]:
        """Return the posted texts of these names: in two requests if all are there, in one if all were seen before."""
        names = list(names)
        unseen: set[str] = {self._key(name) for name in names} - self._seen
        if len(unseen) > 1 and self._store.check([*unseen]):
            self._seen |= unseen
        there = [name for name in names if self._is_there(self._key(name))]
        texts = self._store.multi_get([self._key(name) for name in there]) if there else []
        return {name: text.decode() for name, text in zip(there, texts, strict=True)}

    def has_all(self, names: Sequence[str | int]) -> bool:
        """Return whether all of these names are posted."""
        return self._store.check([self._key(name) for name in names])

    def wait(self, names: Sequence[str | int], seconds: float) -> bool:
        """Wait until all of these names are posted, for at most `seconds`; return whether they are."""
        deadline = time.monotonic() + seconds
        while not (are_there := self.has_all(names)) and time.monotonic() < deadline:
            time.sleep(_BOARD_POLL_SECONDS)
        return are_there

    def _is_there(self, key: str) -> bool:
        """Return whether a key exists, without a request once it was seen: a store would wait for a missing key."""
        if key not in self._seen and self._store.check([key]):
            self._seen.add(key)
        return key in self._seen

    def _key(self, name: str | int) -> str:
        return f"clozeworks/{self._topic}/{name}"


def meet(rank: int, world_size: int, settings: DistributedSettings) -> Board:
    """Wait until all ranks have joined; the caller keeps the board, whose store may be here, until the group exists.

    Raises:
        RankIsMissing: the launcher's address was not reached within `distributed.connect_timeout_seconds`, or not all
            ranks joined within `distributed.meeting_timeout_seconds`.
        UserError: this is rank 0 and the launcher's port is in use.
    """
    deadline = time.monotonic() + settings.meeting_timeout_seconds
    board = Board(_open_store(rank, world_size, settings), _TOPIC)
    try:
        _wait_for_all(board, rank, world_size, settings, deadline)
    except RankIsMissing:
        time.sleep(_FAILURE_SECONDS if rank == 0 else 0)  # the others must read it, and the store may live here
        raise
    except torch.distributed.DistError:
        raise RankIsMissing(
            "rank 0 exited before all ranks had joined", fix="read its own message, then rerun the same command"
        ) from None
    return board


def interface_to_others(board: Board) -> str | None:
    """Return this host's network interface to the other hosts; None with one host, or where none is found.

    Args:
        board: the result of `meet`.
    """
    peer = board.read(_ALL_JOINED)
    assert peer is not None
    return interface_towards(os.environ["MASTER_ADDR"], peer)


def _wait_for_all(board: Board, rank: int, world_size: int, settings: DistributedSettings, deadline: float) -> None:
    board.post(rank, source_address(os.environ["MASTER_ADDR"]))
    while board.read(_ALL_JOINED) is None:
        if rank == 0 and board.has_all(range(world_size)):
            board.post(_ALL_JOINED, common_peer([*board.read_all(range(world_size)).values()]))
        elif (failure := board.read(_FAILURE)) is not None:
            raise RankIsMissing(failure, fix="rerun the same command")
        elif time.monotonic() > deadline:
            joined = board.read_all(range(world_size))
            missing = [other for other in range(world_size) if other not in joined]
            failure = _list_missing(missing, world_size, settings.meeting_timeout_seconds)
            board.post(_FAILURE, failure)
            raise RankIsMissing(failure, fix="rerun the same command")
        else:
            time.sleep(_POLL_SECONDS)


def _open_store(rank: int, world_size: int, settings: DistributedSettings) -> torch.distributed.TCPStore:
    """Return the store at the launcher's address; rank 0 owns it unless torchrun's agent does."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=settings.meeting_timeout_seconds)
    is_owner = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    owned = _create_store(port, world_size, timeout) if is_owner else None
    seconds = min(settings.connect_seconds(world_size), settings.meeting_timeout_seconds)
    # Python tries the address first, because torch's client prints its stacks while it waits.
    error = wait_for_answer(address, port, seconds)
    joined = _join_store(address, port, world_size, seconds) if error is None else error
    if isinstance(joined, Exception):
        raise _unreachable(joined, address, port, seconds, is_owner)
    if owned is not None and Board(joined, _TOPIC).read(_OWNER) is None:
        other = RuntimeError("the store of another process answers there")
        raise _unreachable(other, address, port, seconds, is_owner)
    joined.set_timeout(timeout)
    return owned or joined


def _create_store(port: int, world_size: int, timeout: timedelta) -> torch.distributed.TCPStore:
    """Create rank 0's store at localhost, because the launcher's name may not resolve (yet).

    Raises:
        UserError: the port is in use.
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
    Board(store, _TOPIC).post(_OWNER, "here")
    return store


def _join_store(
    address: str, port: int, world_size: int, seconds: float
) -> torch.distributed.TCPStore | RuntimeError | TimeoutError:
    """Return a client of the store at the address, or the error after `seconds`.

    It connects in a thread: torch's client waits forever for a server that accepts the connection and never answers.
    """
    outcomes: list[torch.distributed.TCPStore | RuntimeError] = []

    def connect() -> None:
        limit = timedelta(seconds=seconds)
        try:
            outcomes.append(
                torch.distributed.TCPStore(
                    address, port, world_size, is_master=False, timeout=limit, wait_for_workers=False
                )
            )
        except RuntimeError as error:
            outcomes.append(error)

    thread = threading.Thread(target=connect, name="meeting", daemon=True)
    thread.start()
    thread.join(seconds + _CONNECT_SECONDS)
    return outcomes[0] if outcomes else TimeoutError("it accepts the connection and never answers")


def wait_for_answer(address: str, port: int, seconds: float) -> OSError | None:
    """Try to connect to the address for `seconds`, at least once; return the last error, or None once it answers.

    Name resolution may make an attempt take longer.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((address, port), timeout=_CONNECT_SECONDS).close()
            return None
        except OSError as error:
            if time.monotonic() + _POLL_SECONDS > deadline:
                return error
        time.sleep(_POLL_SECONDS)


def _unreachable(error: Exception, address: str, port: int, seconds: float, is_owner: bool) -> RankIsMissing:
    """Return the error of a rank that cannot reach the launcher's address; `is_owner` for rank 0, which listens there.

    All three causes have the same code because one and the same fault shows as any of them on different hosts.
    """
    within = f"on host {socket.gethostname()} within distributed.connect_timeout_seconds={seconds}"
    rerun = "rerun the same command; raise the setting if host names or hosts appear late"
    if isinstance(error, socket.gaierror):
        return RankIsMissing(
            f"MASTER_ADDR={address} did not resolve {within} ({error.strerror})",
            fix=f"give the launcher a name or address of rank 0's host that every host resolves, and {rerun}",
        )
    reason = (error.strerror if isinstance(error, OSError) else None) or first_line(error)
    if is_owner:
        return RankIsMissing(
            f"rank 0 cannot connect to itself at MASTER_ADDR={address}, port {port}, {within} ({reason})",
            fix=f"give the launcher an address of this host, and {rerun}",
        )
    return RankIsMissing(
        f"rank 0 does not answer at {address}:{port} {within} ({reason}): it ended, has not started, or is unreachable "
        "from this host",
        fix=f"read rank 0's own message, check address and port, and {rerun}",
    )


def _list_missing(ranks: list[int], world_size: int, timeout_seconds: int) -> str:
    more = f" and {len(ranks) - _MAX_LISTED} more" if len(ranks) > _MAX_LISTED else ""
    return (
        f"rank {', '.join(map(str, ranks[:_MAX_LISTED]))}{more} of {world_size} did not join within "
        f"distributed.meeting_timeout_seconds={timeout_seconds}: it ended before (see its own message), or its host is "
        "down"
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its class where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def source_address(destination: str) -> str:
    """Return the address from which this host sends packets to `destination` (name or address); `NONE` if none."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(destination, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as connected:
            connected.connect(address)  # sends nothing
            return str(connected.getsockname()[0]).partition("%")[0]
    except OSError:
        return NONE


def common_peer(addresses: Sequence[str]) -> str:
    """Return an address to find the route to, for hosts on which the launcher's name resolves to the loopback.

    `addresses` are the `source_address` to the launcher's address of each rank. `NONE` if all ranks are on one host.
    """
    reachable = [address for address in addresses if address != NONE and not is_loopback(address)]
    return reachable[0] if reachable and len(set(addresses)) > 1 else NONE


def interface_towards(launcher: str, peer: str) -> str | None:
    """Return this host's interface to the others from the launcher's address and `common_peer`; None if unknown."""
    if peer == NONE:
        return None
    address = source_address(launcher)
    if address == NONE or is_loopback(address):
        address = source_address(peer)
    return None if address == NONE or is_loopback(address) else interface_of(address)


def interface_of(address: str) -> str | None:
    """Return the interface that has the address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return name
    return None


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
