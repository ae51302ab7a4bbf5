"""One TCP connection to a rank on another host: what is known of its other end, and how its death is noticed.

The kernel's user timeout ends a connection to a host that has vanished, but also one whose other end has been stopped
until its buffer was full. So whoever sends much, or sends without end, looks at `room` first.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import termios

from odc.memory import close_after_fork
from odc.runtime.frames import Frame

#: Bytes of the other end's buffer that are left to words: more than those of the two epochs that ranks may be apart.
RESERVED = 1 << 14
_KEEPALIVE_S, _KEEPALIVES = 1, 1
_UNACKNOWLEDGED_MS = 2300  # between the second and the third probe: one that is lost on a busy network ends nothing
_SEND_S = 5.0  # that a full buffer is waited for: the other host's daemon has been stopped for long
_WINDOW = struct.Struct("228xI")  # tcpi_snd_wnd in Linux's struct tcp_info, from 5.4 on
_CLOSED = b"\7"  # TCP_CLOSE, its tcpi_state


class HostLink:
    """One connection, to `member`. The daemon receives; who sends sees to it that it is one at a time."""

    def __init__(self, member: int, connection: socket.socket) -> None:
        self.member, self._connection = member, connection
        _keep_alive(connection)
        close_after_fork(self)

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, *frames: Frame) -> None:
        """Send frames together; raises OSError where the link is broken."""
        self._connection.sendall(b"".join(frame.encode() for frame in frames))

    def receive(self) -> bytes | None:
        """What has arrived; None if nothing has, empty at the end. Raises OSError where the link is broken."""
        try:
            return self._connection.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None

    def room(self, nbytes: int) -> bool:
        """Whether the other end has room for so much, and for words after it, though it may not read for long. True
        where the kernel does not say, and where the link is broken.
        """
        told = self._told()
        return len(told) < _WINDOW.size or _WINDOW.unpack(told)[0] - self._unacknowledged() >= nbytes + RESERVED

    def unacknowledged(self) -> int:
        """Bytes that were sent and have not arrived, as far as this host knows; 0 where the link is broken."""
        return self._unacknowledged() if self._told() else 0

    def _unacknowledged(self) -> int:
        try:
            (nbytes,) = struct.unpack("i", fcntl.ioctl(self._connection, termios.TIOCOUTQ, bytes(4)))
        except (OSError, ValueError):  # the latter of one that another thread has closed
            return 0
        return int(nbytes)

    def _told(self) -> bytes:
        """The kernel's struct tcp_info; empty where the link is broken."""
        with contextlib.suppress(OSError):
            found = self._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _WINDOW.size)
            return b"" if found[:1] == _CLOSED else found
        return b""

    def hang_up(self) -> None:
        """Close it; what was acknowledged before can still be read there."""
        with contextlib.suppress(OSError):  # the other end was quicker
            self._connection.shutdown(socket.SHUT_WR)
        self.close()

    def close(self) -> None:
        self._connection.close()


def _keep_alive(connection: socket.socket) -> None:
    """Have a host that has vanished noticed within two to three seconds; one that is stopped still answers."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
    seconds = int(_SEND_S)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, 0))
