"""Ports for servers and groups of ranks that tests start."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """A port that is free now, and that the kernel gives to no outgoing connection until it is bound.

    Those begin at 32768 by default (net.ipv4.ip_local_port_range); what is started here takes seconds to bind its own.
    """
    for port in random.SystemRandom().sample(range(15_000, 32_000), 100):
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")
