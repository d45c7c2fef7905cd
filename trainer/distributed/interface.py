"""Network interface between the hosts of a run.

By default gloo offers the address to which the host's name resolves. On many systems that is 127.0.1.1, to which no
other host can connect. The route to the launcher's address yields a better one.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

import psutil

NONE = "none"


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
