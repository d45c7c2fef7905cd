"""The rendezvous, messages through the store, and the interface between hosts."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch.distributed

from tests.support import toy_processes
from tests.support.toy_processes import finish, start_ranks
from trainer.config.training_settings import DistributedSettings
from trainer.distributed import rendezvous
from trainer.distributed.rendezvous import (
    LOST_RANK_EXIT_STATUS,
    NONE,
    Board,
    RankIsMissing,
    common_peer,
    interface_of,
    interface_towards,
    meet,
    source_address,
)
from trainer.distributed.stop_signal import STOPPED_EXIT_STATUS

pytestmark = pytest.mark.spawn

SCRIPT = str(Path(__file__).with_name("toy_rendezvous.py"))
PROMPT_SECONDS = 50
"""For what would otherwise wait for 600."""


Start = Callable[..., list[subprocess.Popen[str]]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Start ranks without the one that is absent, and have them begin once all listen to signals."""

    def start(mode: str, seconds: int, world_size: int, absent: int | None = None) -> list[subprocess.Popen[str]]:
        ranks = start_ranks([SCRIPT, mode, str(seconds), str(tmp_path / "go")], world_size)
        if absent is not None:
            ranks[absent].kill()
            ranks.pop(absent).communicate()
        for rank in ranks:
            assert rank.stdout is not None and rank.stdout.readline() == "listening\n"
        (tmp_path / "go").touch()
        return ranks

    return start


@pytest.mark.parametrize(
    ("number", "absent"),
    [(signal.SIGTERM, 1), (signal.SIGTERM, 0), (signal.SIGUSR1, 1), (signal.SIGINT, 0)],
    ids=["TERM to rank 0", "TERM to rank 1", "USR1 to rank 0", "INT to rank 1"],
)
def test_a_rank_that_waits_for_a_dead_peer_leaves_on_a_signal(number, absent, start):
    (rank,) = start("all is well", 600, world_size=2, absent=absent)
    time.sleep(1.5)  # most likely it waits by then; its exit status says that the signal ended it
    rank.send_signal(number)
    at = time.monotonic()
    ((status, _, stderr),) = finish([rank], timeout=300)
    assert status == STOPPED_EXIT_STATUS and time.monotonic() - at < PROMPT_SECONDS, stderr
    cause = f"rank {1 - absent} ({socket.gethostname()}): {number.name}"
    says = f"stopped by {cause} before the first step; nothing to save" in stderr
    assert says is (absent == 1), f"one rank of a node speaks: {stderr!r}"


def test_a_rank_that_waits_outside_python_leaves_on_a_signal(start):
    """Of two ranks that have met one dies, and the other waits in torch for the group, where no handler runs."""
    ranks = start("dies after the meeting", 600, world_size=2)
    assert ranks[1].wait(timeout=300) == 3
    time.sleep(2)  # as above
    ranks[0].send_signal(signal.SIGTERM)
    at = time.monotonic()
    (status, _, stderr), _ = finish(ranks, timeout=300)
    assert status == STOPPED_EXIT_STATUS and time.monotonic() - at < PROMPT_SECONDS, stderr


@pytest.mark.fault(
    row="52",
    fault="a rank is killed before the ranks meet",
    required="every other one leaves with 76 after distributed.meeting_timeout_seconds and names it in one paragraph",
)
def test_a_rank_that_does_not_come_is_named_on_all_others(start):
    results = finish(start("all is well", 8, world_size=4, absent=2), timeout=120)
    assert [status for status, _, _ in results] == [LOST_RANK_EXIT_STATUS] * 3, results
    told = "rank 2 of 4 did not join within distributed.meeting_timeout_seconds=8: it ended before"
    for rank, (_, _, stderr) in zip((0, 1, 3), results, strict=True):
        assert f"{'' if rank == 0 else f'rank {rank}: '}error: {told}" in stderr and "Traceback" not in stderr


def test_a_first_rank_that_does_not_come_is_named_on_all_others(start):
    results = finish(start("all is well", 6, world_size=3, absent=0), timeout=120)
    assert [status for status, _, _ in results] == [LOST_RANK_EXIT_STATUS] * 2, results
    for _, _, stderr in results:
        assert "error: rank 0 does not answer at 127.0.0.1:" in stderr and "(Connection refused)" in stderr
        assert "distributed.connect_timeout_seconds=6" in stderr and "Traceback" not in stderr


@pytest.mark.fault(
    row="52",
    fault="MASTER_ADDR does not resolve",
    required="retried for distributed.connect_timeout_seconds, then one paragraph and status 76 on every rank",
)
def test_a_name_that_does_not_resolve_ends_every_rank_with_one_paragraph(start, monkeypatch):
    monkeypatch.setattr(toy_processes, "MASTER_ADDR", "no-such-host.invalid")
    for rank, (status, _, stderr) in enumerate(finish(start("all is well", 2, world_size=2), timeout=300)):
        assert status == LOST_RANK_EXIT_STATUS, stderr
        opening = f"{'' if rank == 0 else 'rank 1: '}error: MASTER_ADDR=no-such-host.invalid did not resolve on host "
        assert stderr.startswith(opening) and stderr.count("\n") == 1, stderr
        assert "within distributed.connect_timeout_seconds=2" in stderr and "Fix: " in stderr, stderr


@pytest.mark.slow
def test_an_address_of_another_host_is_reported_by_rank_0(start, monkeypatch):
    """An address for documentation (RFC 5737), which is no host's; here something may answer, and is no store."""
    monkeypatch.setattr(toy_processes, "MASTER_ADDR", "192.0.2.77")
    ((status, _, stderr),) = finish(start("all is well", 2, world_size=1), timeout=300)
    assert status == LOST_RANK_EXIT_STATUS, stderr
    assert (
        stderr.startswith("error: rank 0 cannot connect to itself at MASTER_ADDR=192.0.2.77")
        and stderr.count("\n") == 1
    )


@pytest.mark.parametrize(("given", "world_size", "seconds"), [(None, 1, 30), (None, 512, 158), (20, 512, 20)])
def test_more_ranks_have_more_time_to_connect_unless_the_user_sets_it(
    given: int | None, world_size: int, seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, waited = DistributedSettings(connect_timeout_seconds=given), []

    def refuse(address: str, port: int, seconds: float) -> OSError:
        waited.append(seconds)
        return ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(rendezvous, "wait_for_answer", refuse)
    with pytest.raises(RankIsMissing, match=f"connect_timeout_seconds={seconds} "):
        meet(world_size, world_size + 1, settings)
    assert waited == [seconds]


def test_names_that_appear_late_are_waited_for(monkeypatch):
    tries: list[str] = []

    def resolve_at_third_try(address: tuple[str, int], timeout: float) -> socket.socket:
        tries.append(address[0])
        if len(tries) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return socket.socket()

    monkeypatch.setattr(rendezvous.socket, "create_connection", resolve_at_third_try)
    assert rendezvous.wait_for_answer("pod-0", 1, seconds=300) is None and tries == ["pod-0"] * 3
    tries.clear()
    assert isinstance(rendezvous.wait_for_answer("pod-0", 1, seconds=0), socket.gaierror) and len(tries) == 1


def test_something_that_accepts_and_is_silent_is_not_waited_for_for_ever():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = rendezvous._join_store("127.0.0.1", silent.getsockname()[1], 2, seconds=1)
        assert isinstance(found, TimeoutError)


@pytest.mark.fault(
    row="52",
    fault="a rank ends between the meeting and the process group",
    required="the other one leaves with 76, one paragraph and no traceback",
)
def test_a_rank_that_dies_between_the_meeting_and_the_group_is_reported_as_lost(start):
    ranks = start("dies after the meeting", 5, world_size=2)
    (status, _, stderr), _ = finish(ranks, timeout=90)
    assert status == LOST_RANK_EXIT_STATUS and "[process-group-not-connected]" in stderr, stderr
    assert "Traceback" not in stderr


def test_a_port_that_another_run_has_is_reported(start, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setattr(toy_processes, "free_port", lambda: other.getsockname()[1])
        ((status, _, stderr),) = finish(start("all is well", 600, world_size=1), timeout=300)
    assert (status == 1 and "[port-in-use]" in stderr) or "is in use" in stderr, stderr
    assert "Traceback" not in stderr


@pytest.fixture
def store() -> torch.distributed.Store:
    return torch.distributed.HashStore()


def test_others_read_the_newest_text_of_a_name(store):
    mine, other = Board(store, "topic"), Board(store, "topic")
    assert other.read(1) is None and other.read_all([0, 1, "verdict"]) == {}
    mine.post(1, "here")
    mine.post("verdict", "ä")
    assert (other.read(1), other.read("verdict")) == ("here", "ä")
    mine.post(1, "there")
    assert other.read_all([0, 1, "verdict"]) == {1: "there", "verdict": "ä"}
    assert Board(store, "another topic").read(1) is None


def test_a_name_that_nobody_posts_is_waited_for_no_longer_than_that(store):
    board = Board(store, "topic")
    board.post(0, "here")
    assert board.has_all([0]) and not board.has_all([0, 1])
    started_at = time.monotonic()
    assert not board.wait([0, 1], seconds=0.3)
    assert 0.3 <= time.monotonic() - started_at < 20


def test_waiting_ends_once_all_names_are_there(store):
    board = Board(store, "topic")
    board.post(0, "here")
    later = threading.Timer(0.2, board.post, (1, "here"))
    later.start()
    assert board.wait([0, 1], seconds=60)
    later.join()


def test_a_name_that_was_seen_is_read_without_asking_for_it_again():
    class Asked(torch.distributed.HashStore):
        asked = 0

        def check(self, keys: list[str]) -> bool:
            Asked.asked += 1
            return super().check(keys)

    store = Asked()
    board = Board(store, "topic")
    board.post(0, "here")
    assert [board.read_all([0, 1]) for _ in range(3)] == [{0: "here"}] * 3
    assert Asked.asked == 1 + 1 + 3, "once for both, once for rank 0, each time for rank 1"
    for rank in range(512):
        board.post(rank, "here")
    Asked.asked = 0
    assert len(Board(store, "topic").read_all(range(512))) == 512 and Asked.asked == 1


def test_the_first_of_several_texts_stays(store):
    for text in ("the cause", "what followed"):
        Board(store, "topic").post_first("error", text)
    assert Board(store, "topic").read("error") == "the cause"


Address = namedtuple("Address", "address")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A host with three interfaces; its routes, from a destination to the address from which packets leave."""
    routes: dict[str, str] = {}
    interfaces = {
        "lo": [Address("127.0.0.1"), Address("::1")],
        "eth0": [Address("10.0.0.2"), Address("fe80::2%eth0")],
        "ib0": [Address("fd00::2")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    monkeypatch.setattr(rendezvous, "source_address", lambda destination: routes.get(destination, NONE))
    return routes


@pytest.mark.parametrize(
    ("routes", "peer", "expected"),
    [
        ({"node-a": "10.0.0.2"}, "10.0.0.1", "eth0"),
        ({"node-a": "fd00::2"}, "fd00::1", "ib0"),
        # On the launcher's host, whose name leads to itself, the route to another host counts.
        ({"node-a": "127.0.1.1", "10.0.0.7": "10.0.0.2"}, "10.0.0.7", "eth0"),
        ({"node-a": "::1", "10.0.0.7": "10.0.0.2"}, "10.0.0.7", "eth0"),
        ({"node-a": "10.0.0.2"}, NONE, None),  # one host
        ({"node-a": "127.0.0.1"}, "10.0.0.7", None),  # no route to the other
        ({"node-a": "10.9.9.9"}, "10.0.0.7", None),  # an address of no interface
        ({}, "10.0.0.7", None),
    ],
)
def test_the_interface_is_that_of_the_route(host, routes, peer, expected):
    host.update(routes)
    assert interface_towards("node-a", peer) == expected


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (["127.0.0.1", "127.0.0.1"], NONE),
        (["10.0.0.1", "10.0.0.1"], NONE),
        ([NONE, NONE], NONE),
        (["127.0.1.1", "127.0.1.1", "10.0.0.2", "10.0.0.3"], "10.0.0.2"),
        (["10.0.0.1", "10.0.0.2"], "10.0.0.1"),
        (["10.0.0.1", NONE], "10.0.0.1"),
    ],
)
def test_a_peer_is_named_where_there_are_several_hosts(addresses, expected):
    assert common_peer(addresses) == expected


def test_this_machines_loopback_is_found_and_names_that_lead_nowhere_are_not():
    assert source_address("127.0.0.1") == "127.0.0.1"
    name = interface_of("127.0.0.1")
    assert name is not None and name in psutil.net_if_addrs()
    assert source_address("no-such-host.invalid") == NONE
