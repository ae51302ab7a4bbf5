"""A TCP listener that hands over admitted connections; a visitor that is silent or wrong costs a descriptor for 2 s.

Nothing here blocks: whoever drives it calls `answer` whenever `fileno()` is readable, and now and then while there are
visitors.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable

from odc.deadlines import ADMISSION_S, Deadline
from odc.memory import close_after_fork
from odc.net.accepting import Acceptor
from odc.net.admission import AdmissionError, Visitor

_MAX_VISITORS = 64
_BACKLOG = 1024


class _Guest:
    def __init__(self, connection: socket.socket, visitor: Visitor) -> None:
        self.connection, self.visitor, self.deadline = connection, visitor, Deadline(ADMISSION_S)


class Reception:
    """Listens at `address` (of one of this host's interfaces), at a port that the system chooses.

    `welcome` gets the purpose, the global rank and the connection, blocking, of everybody who has shown that it knows
    `secret`; it owns the connection. A forked child closes its copies at once.
    """

    def __init__(
        self, address: str, secret: bytes, rank: int, welcome: Callable[[str, int, socket.socket], None]
    ) -> None:
        self._secret, self._rank, self._welcome = secret, rank, welcome
        self._guests: dict[int, _Guest] = {}
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._epoll = select.epoll()
        self._acceptor: Acceptor | None = None
        try:
            self._socket.setblocking(False)
            self._socket.bind((address, 0))
            self._socket.listen(_BACKLOG)
            self._acceptor = Acceptor(self._socket, self._epoll, f"{address}:{self._socket.getsockname()[1]}")
        except OSError:
            self.close()
            raise
        self.address, self.port = address, int(self._socket.getsockname()[1])
        close_after_fork(self)

    def fileno(self) -> int:
        return self._epoll.fileno()

    @property
    def busy(self) -> bool:
        """Whether a visitor's time is running."""
        return bool(self._guests)

    def answer(self) -> None:
        """Serve every visitor as far as that goes without waiting. Never raises for a bad one."""
        if self._epoll.closed:
            return
        for fd, _ in self._epoll.poll(0):
            if fd == self._socket.fileno():
                self._accept()
            elif fd in self._guests:
                self._advance(self._guests[fd])
        for late in [guest for guest in self._guests.values() if guest.deadline.passed()]:
            self._release(late).close()

    def _accept(self) -> None:
        assert self._acceptor is not None
        for connection in self._acceptor.accept(_MAX_VISITORS):
            connection.setblocking(False)
            while len(self._guests) >= _MAX_VISITORS:  # the oldest has kept silent for longest
                self._release(next(iter(self._guests.values()))).close()
            guest = self._guests[connection.fileno()] = _Guest(connection, Visitor(self._secret, self._rank))
            self._epoll.register(connection, select.EPOLLIN)
            self._advance(guest)

    def _advance(self, guest: _Guest) -> None:
        try:
            while guest.visitor.wanted:
                said = guest.connection.recv(guest.visitor.wanted)
                if not said:
                    raise AdmissionError("hung up")
                answer = guest.visitor.feed(said)
                if guest.connection.send(answer) != len(answer):
                    raise AdmissionError("does not listen")
        except BlockingIOError:
            return
        except OSError:
            self._release(guest).close()
            return
        connection = self._release(guest)
        connection.setblocking(True)
        self._welcome(guest.visitor.purpose, guest.visitor.rank, connection)

    def _release(self, guest: _Guest) -> socket.socket:
        fd = guest.connection.fileno()
        self._guests.pop(fd, None)
        with contextlib.suppress(OSError):
            self._epoll.unregister(fd)
        return guest.connection

    def close(self) -> None:
        """Stop listening, hang up on visitors; idempotent. Closing and nothing else: a forked child runs this too."""
        for guest in self._guests.values():
            guest.connection.close()
        self._guests.clear()
        self._socket.close()
        self._epoll.close()
        if self._acceptor is not None:
            self._acceptor.close()
