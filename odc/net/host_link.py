"""One TCP connection to a rank on another host: what is known of its other end, and how its death is noticed.

The kernel's user timeout ends a connection to a host that has vanished, but also one whose other end has been stopped
until its buffer was full. So a thread that sends much, or sends without end, checks `room` first.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import termios
from collections.abc import Iterator

from odc.deadlines import LINK_SEND_S
from odc.memory import close_after_fork
from odc.net.messages import Message, MessageReader
from odc.net.tcp import keep_alive, limit_calls, silent_for_long
from odc.settings import LOST_AFTER_S

#: Bytes of the other end's buffer that are left to words: more than those of the two epochs that ranks may be apart.
RESERVED = 1 << 14
_WINDOW = struct.Struct("228xI")  # tcpi_snd_wnd in Linux's struct tcp_info, from 5.4 on
_HEARD = struct.Struct("52xII")  # tcpi_last_data_recv and tcpi_last_ack_recv there, milliseconds ago
_CLOSED = b"\7"  # TCP_CLOSE, its tcpi_state


class HostLink:
    """One connection, to `member`. The daemon receives; callers of `send` take turns."""

    def __init__(self, member: int, connection: socket.socket, lost_after_s: float = LOST_AFTER_S) -> None:
        self.member, self._connection = member, connection
        self._broken: OSError | None = None
        self.wait_for_network(lost_after_s)
        close_after_fork(self)

    def wait_for_network(self, lost_after_s: float) -> None:
        """End the link once the other host has acknowledged nothing for so long (see `keep_alive`)."""
        self._lost_after_s = lost_after_s
        keep_alive(self._connection, lost_after_s)
        limit_calls(self._connection, socket.SO_SNDTIMEO, lost_after_s + LINK_SEND_S)

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, encoded: bytes) -> None:
        """Send encoded messages; raises OSError where the link is broken, as it is once a part of one was sent."""
        if self._broken is not None:
            raise self._broken.with_traceback(None)  # or it would hold the frames of each
        view, sent = memoryview(encoded), list[int]()
        try:
            while (at := sum(sent)) < len(encoded):
                # By `map`: a signal's handler that raises as the call returns does not lose its number.
                sent.extend(map(self._connection.send, (view[at:],)))
        except BaseException as error:
            if isinstance(error, OSError) or 0 < sum(sent) < len(encoded):
                self._broken = error if isinstance(error, OSError) else OSError(f"{error!r} came amid a message")
            raise

    def receive(self) -> bytes | None:
        """What has arrived; None if nothing has, empty at the end. Raises OSError where the link is broken."""
        try:
            return self._connection.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None

    def messages(self, reader: MessageReader) -> Iterator[Message]:
        """The messages that what has arrived completes. Raises ConnectionResetError at the end, OSError where the link
        is broken, and as `reader` does. Reads once: the loop calls again if there is more, and serves others before.
        """
        data = self.receive()
        if data == b"":
            raise ConnectionResetError("end of the stream")
        yield from reader.feed(data or b"")

    def room(self, nbytes: int) -> bool:
        """Whether the other end has room for so much, and for words after it, though it may not read for long. True
        where the kernel does not say, and where the link is broken.
        """
        info = self._tcp_info()
        return len(info) < _WINDOW.size or _WINDOW.unpack(info)[0] - self._unacknowledged() >= nbytes + RESERVED

    def unacknowledged(self) -> int:
        """Bytes that were sent and have not arrived, as far as this host knows; 0 where the link is broken."""
        return self._unacknowledged() if self._tcp_info() else 0

    def _unacknowledged(self) -> int:
        try:
            (nbytes,) = struct.unpack("i", fcntl.ioctl(self._connection, termios.TIOCOUTQ, bytes(4)))
        except (OSError, ValueError):  # the latter of one that another thread has closed
            return 0
        return int(nbytes)

    def _tcp_info(self) -> bytes:
        """The kernel's struct tcp_info; empty where the link is broken."""
        with contextlib.suppress(OSError):
            found = self._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _WINDOW.size)
            return b"" if found[:1] == _CLOSED else found
        return b""

    def silent(self) -> bool:
        """Whether the other host has been silent for nearly as long as ends a link, or the link has ended."""
        info = self._tcp_info()
        return len(info) < _HEARD.size or silent_for_long(min(_HEARD.unpack_from(info)) / 1000, self._lost_after_s)

    def hang_up(self) -> None:
        """Close it; what was acknowledged before can still be read there."""
        with contextlib.suppress(OSError):  # the other end was quicker
            self._connection.shutdown(socket.SHUT_WR)
        self.close()

    def close(self) -> None:
        self._connection.close()


def side_to_blame(here: set[int], beyond: set[int], first: int) -> tuple[set[int], str]:
    """The side to name of hosts, as numbers, between which the network has been cut, and why that one.

    It is the side with fewer hosts, and of two equal sides the one without host `first`. Both sides come to the same,
    though neither hears the other.
    """
    if len(here) != len(beyond):
        return min(here, beyond, key=len), "the smaller side"
    return (beyond if first in here else here), "the side without the lowest rank"
