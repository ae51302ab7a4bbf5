"""How a TCP connection notices that the other end's host has vanished: by the kernel's probes and its user timeout."""

from __future__ import annotations

import math
import socket

from odc.deadlines import ENGINE_LONGER_S, PROBE_S

_MOST_PROBES = 120  # the kernel counts up to 127


def keep_alive(connection: socket.socket, lost_after_s: float) -> None:
    """Have `connection` end, with ETIMEDOUT, once its other end's host has acknowledged nothing for `lost_after_s`; an
    idle one up to a second later. A process there that is merely stopped still acknowledges.
    """
    _probe(connection, PROBE_S, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(lost_after_s * 1000))


def keep_engine_alive(connection: socket.socket, lost_after_s: float, *, sends_bulk: bool) -> None:
    """As `keep_alive`, but later than links, which report the reason to every rank. The kernel's user timeout would
    also end a connection that `sends_bulk` to a reader that is merely stopped; probes alone do not.
    """
    longest = lost_after_s + ENGINE_LONGER_S
    interval = max(2 * PROBE_S, math.ceil(longest / _MOST_PROBES))
    _probe(connection, interval, math.ceil(longest / interval) - 1)
    if not sends_bulk:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(longest * 1000))


def silent_for_long(silent_s: float, lost_after_s: float) -> bool:
    """Whether a connection that heard nothing for `silent_s` has probably been lost together with one that is known to
    be: on one that works the probes are answered every second.
    """
    return silent_s > max(lost_after_s - 1.05 * PROBE_S, 1.05 * PROBE_S)


def _probe(connection: socket.socket, interval_s: int, most: int) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, most)
