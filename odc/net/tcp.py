"""TCP of this host: where others reach it, and how a connection notices that the other end's host has vanished.

That is by the kernel's probes and its user timeout. A process there that is merely stopped still acknowledges.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import math
import socket
import struct
from pathlib import Path
from typing import Any

from odc.deadlines import ENGINE_LONGER_S, PROBE_S, READ_CHECK_S
from odc.errors import UnsupportedError
from odc.net.store import store_address, underlying

_MOST_PROBES = 120  # the kernel counts up to 127
_SIOCGIFADDR = 0x8915
_IPV6 = Path("/proc/net/if_inet6")
_TIMEVAL = struct.Struct("ll")
_ELSEWHERE = ("198.51.100.1", 9)  # of a network that is nowhere, so by the default route


def own_address(store: Any, address: str = "") -> str:
    """Where other hosts reach this one: at `address`, or at that of the interface by which the store is reached; by
    the default route, where the store's host is this one under a name that means loopback here.

    `store` is torch's. Raises UnsupportedError where that cannot be determined, and for the address of every interface.
    """
    if address in ("0.0.0.0", "::"):
        raise UnsupportedError(
            f"Settings(address={address!r}) is every interface, and no place where another host reaches this one: it "
            "would reach itself; name the address of one"
        )
    if address:
        return address
    hosted_at = store_address(store)
    if hosted_at is None:
        name = type(underlying(store)).__name__
        raise UnsupportedError(
            f"cannot determine this host's address from a {name}; set Settings(address=...) on each host"
        )
    try:
        found = _interface_towards(*hosted_at)
    except OSError as error:  # a resolver that does not answer any more, too
        raise UnsupportedError(
            f"cannot determine this host's address: there is no way to {hosted_at[0]}, which hosts the job's store "
            f"({error}); set Settings(address=...) on each host"
        ) from error
    if hosted_at[0] in ("localhost", found) or not ipaddress.ip_address(found).is_loopback:
        return found
    try:  # /etc/hosts gives this host's own name a loopback address, as Debian does
        return _interface_towards(*_ELSEWHERE)
    except OSError as error:
        raise UnsupportedError(
            f"{hosted_at[0]} is {found} here, which no other host reaches, and there is no default route ({error}); "
            "set Settings(address=...) on each host"
        ) from error


def _interface_towards(host: str, port: int) -> str:
    """The address of the interface by which this host reaches another, or itself."""
    family, kind, protocol, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(there)  # of a datagram socket: chooses the interface, sends nothing
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The network interface that has an address as its first IPv4 address, or one of its IPv6 ones; None if there is
    none.
    """
    if ":" in address:
        return _interface_of_ipv6(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


def _interface_of_ipv6(address: str) -> str | None:
    wanted = ipaddress.ip_address(address.partition("%")[0])
    with contextlib.suppress(OSError):  # a kernel without IPv6
        for line in _IPV6.read_text().splitlines():
            digits, *_, name = line.split()
            if int(digits, 16) == int(wanted):
                return name
    return None


def bind(address: str, ports: tuple[int, int] | None = None) -> socket.socket:
    """A listening socket at `address`, of one of this host's interfaces, at a port that the system chooses, or at the
    first of `ports`, first and last, that is free. OSError where none is.
    """
    first, last = ports or (0, 0)
    for port in range(first, last + 1):
        made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        try:
            if ports is not None:  # a job that has ended would keep its port for a minute
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((address, port))
            made.listen()  # two may have bound a port, of which one can listen
            return made
        except OSError as error:
            made.close()
            if error.errno != errno.EADDRINUSE or ports is None:
                raise
    raise OSError(errno.EADDRINUSE, f"every port from {first} to {last} is taken")


def keep_alive(
    connection: socket.socket, lost_after_s: float, interval_s: int = PROBE_S, *, sends_bulk: bool = False
) -> None:
    """End `connection`, with ETIMEDOUT, once its other end's host has acknowledged nothing for `lost_after_s`; an idle
    one up to a probe's interval later.

    The kernel's user timeout would also end a connection that `sends_bulk` to a reader that is merely stopped; probes
    alone do not.
    """
    probes = min(_MOST_PROBES, max(1, math.ceil(lost_after_s / interval_s) - 1))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)
    if not sends_bulk:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(lost_after_s * 1000))


def silent_for_long(silent_s: float, lost_after_s: float) -> bool:
    """Whether a connection that heard nothing for `silent_s` has probably been lost together with one that is known to
    be: on one that works the probes are answered every second.
    """
    return silent_s > max(lost_after_s - 1.05 * PROBE_S, 1.05 * PROBE_S)


def limit_calls(connection: socket.socket, option: int, seconds: float) -> None:
    """Let every blocking call of a direction, SO_RCVTIMEO or SO_SNDTIMEO, last for `seconds` at most."""
    whole, rest = divmod(seconds, 1)
    connection.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(whole), int(rest * 1e6)))


def set_for_reader(connection: socket.socket, lost_after_s: float) -> None:
    """Let a receive wait for `READ_CHECK_S` at most, and fail some seconds after a link to that host would: links
    report the reason to every rank.
    """
    _keep_engine_alive(connection, lost_after_s, sends_bulk=False)
    connection.setblocking(True)
    limit_calls(connection, socket.SO_RCVTIMEO, READ_CHECK_S)


def set_for_server(connection: socket.socket, lost_after_s: float) -> None:
    """Let no call wait, and the connection end with the reader's host, but not because the reader takes its time."""
    _keep_engine_alive(connection, lost_after_s, sends_bulk=True)
    connection.setblocking(False)


def _keep_engine_alive(connection: socket.socket, lost_after_s: float, *, sends_bulk: bool) -> None:
    longest = lost_after_s + ENGINE_LONGER_S
    keep_alive(connection, longest, max(2 * PROBE_S, math.ceil(longest / _MOST_PROBES)), sends_bulk=sends_bulk)


def hang_up(connection: socket.socket) -> None:
    """Close a connection that other threads may be waiting on; they wake."""
    with contextlib.suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
