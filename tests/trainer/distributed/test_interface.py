"""The interface by which hosts reach each other, on this machine's own interfaces and for hosts that are made up."""

from __future__ import annotations

from collections import namedtuple

import psutil
import pytest

from trainer.distributed import rendezvous
from trainer.distributed.rendezvous import NONE, common_peer, interface_of, interface_towards, source_address

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
