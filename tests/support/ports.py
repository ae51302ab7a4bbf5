"""Ports that a test names before some process listens there."""

from __future__ import annotations

import contextlib
import random
import socket


def free_ports(count: int) -> list[int]:
    """Ports that are free now, below those that the kernel gives to sockets which ask for any."""
    found = list[int]()
    for port in random.SystemRandom().sample(range(15000, 32000), 1000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"no {count} ports are free")
