"""The address under which other hosts reach this one."""

from __future__ import annotations

import socket
from typing import Any

from odc.errors import UnsupportedError
from odc.net.store import store_address, underlying


def own_address(store: Any, address: str = "") -> str:
    """Where other hosts reach this one: at `address`, or at that of the interface by which the store is reached.

    `store` is torch's. Raises UnsupportedError where that cannot be determined.
    """
    if address:
        return address
    hosted_at = store_address(store)
    if hosted_at is None:
        name = type(underlying(store)).__name__
        raise UnsupportedError(
            f"cannot determine this host's address from a {name}; set Settings(address=...) on each host"
        )
    host, port = hosted_at
    found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, there = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(there)  # of a datagram socket: chooses the interface, sends nothing
        return str(probe.getsockname()[0])
