"""Reads over plain TCP: the kernel copies straight from the exposed memory and straight into the destination.

A thread that reads blocks in one system call for each answer, so it is woken at once and costs no turn of Python's lock
in between. A read takes one connection; several reads of one rank at a time take several, which stay open.
"""

from __future__ import annotations

import errno
import socket
import threading

import torch

from odc.errors import WaitTimeoutError
from odc.memory import close_after_fork
from odc.runtime.engines.engine import Check, Dial, bytes_of, hang_up, lost, no_check, refused, set_for_reader
from odc.runtime.engines.server import LENGTH, READ, REFUSED, RegionServer, request
from odc.runtime.wait import Deadline

_MOST_CONNECTIONS = 4  # to one rank


class Connections:
    """Connections to the servers of other ranks, each lent to one thread at a time."""

    def __init__(self, me: int, dial: Dial, timeout_s: float, most: int = _MOST_CONNECTIONS) -> None:
        self.me, self.timeout_s = me, timeout_s
        self._dial, self._most = dial, most
        self._changed = threading.Condition()
        self._idle: dict[int, list[socket.socket]] = {}
        self._all: dict[int, set[socket.socket]] = {}
        self._pending: dict[int, int] = {}  # being made
        self._closed = False
        close_after_fork(self)

    def lend(self, rank: int, what: str, check: Check) -> socket.socket:
        """A connection to `rank` that nobody uses; give it back by `take_back`, or by `discard` after an error."""
        deadline = Deadline(self.timeout_s)
        with self._changed:
            while True:
                if self._closed:
                    raise lost(self.me, rank, what, "this rank's engine is closed")
                if idle := self._idle.get(rank):
                    return idle.pop()
                if len(self._all.get(rank, ())) + self._pending.get(rank, 0) < self._most:
                    self._pending[rank] = self._pending.get(rank, 0) + 1
                    break
                self._changed.wait(1.0)
                check(f"reading {what} of rank {rank}")
                if deadline.passed():
                    raise late(self.me, rank, what, self.timeout_s)
        made: socket.socket | None = None
        try:
            made = self._connect(rank, what, check, deadline)
        finally:
            with self._changed:
                self._pending[rank] -= 1
                if made is not None:
                    self._all.setdefault(rank, set()).add(made)
                self._changed.notify_all()
        return made

    def _connect(self, rank: int, what: str, check: Check, deadline: Deadline) -> socket.socket:
        """A new connection. A rank that does not answer is asked again: it may be stopped, or hold its interpreter."""
        while True:
            try:
                made = self._dial(rank)
                set_for_reader(made)
                return made
            except OSError as error:
                if not isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:  # the latter is the kernel's
                    raise lost(self.me, rank, what, f"no connection to it ({error})") from error
            check(f"reading {what} of rank {rank}")
            if deadline.passed():
                raise late(self.me, rank, what, self.timeout_s)

    def take_back(self, rank: int, connection: socket.socket) -> None:
        with self._changed:
            if connection in self._all.get(rank, ()):
                self._idle.setdefault(rank, []).append(connection)
            self._changed.notify_all()

    def discard(self, rank: int, connection: socket.socket) -> None:
        with self._changed:
            self._all.get(rank, set()).discard(connection)
            hang_up(connection)
            self._changed.notify_all()

    def hang_up(self, rank: int) -> None:
        """End all connections to `rank`, which is dead; whoever waits on one raises."""
        with self._changed:
            self._idle.pop(rank, None)
            for connection in self._all.pop(rank, set()):
                hang_up(connection)
            self._changed.notify_all()

    def close(self) -> None:
        self._closed = True  # without the lock, which a thread of a forked child's parent may hold
        for some in list(self._all.values()):
            for connection in list(some):
                connection.close()


class SocketEngine:
    """An `Engine` over plain TCP, for CPU memory. Raises WaitTimeoutError where `timeout_s` pass without a byte."""

    name = "sockets"

    def __init__(self, me: int, dial: Dial, timeout_s: float) -> None:
        self.me = me
        self._server = RegionServer()
        self._connections = Connections(me, dial, timeout_s)

    def expose(self, region: str, memory: torch.Tensor) -> None:
        bytes_of(memory)
        self._server.expose(region, memory)

    def withdraw(self, region: str) -> None:
        self._server.withdraw(region)

    def adopt(self, connection: socket.socket, rank: int) -> None:
        self._server.adopt(connection, rank)

    def read(
        self,
        rank: int,
        region: str,
        offset: int,
        into: torch.Tensor,
        *,
        what: str = "memory",
        check: Check = no_check,
    ) -> None:
        view = bytes_of(into)
        connection = self._connections.lend(rank, what, check)
        try:
            ask(connection, request(READ, region, offset, len(view)))
            header = bytearray(LENGTH.size)
            fill(connection, [memoryview(header), view], self._connections, rank, what, check)
            (length,) = LENGTH.unpack(header)
            if length != len(view):
                raise refused(self.me, rank, what, region, offset, len(view))
        except OSError as error:
            self._connections.discard(rank, connection)
            raise lost(self.me, rank, what, error) from error
        except BaseException:
            self._connections.discard(rank, connection)
            raise
        self._connections.take_back(rank, connection)

    def hang_up(self, rank: int) -> None:
        """End whatever goes on with `rank`, which is dead."""
        self._connections.hang_up(rank)
        self._server.hang_up(rank)

    def close(self) -> None:
        self._connections.close()
        self._server.close()


def ask(connection: socket.socket, asked: bytes) -> None:
    """Send a request, which is short: it waits only if this host's network is stuck."""
    sent = 0
    while sent < len(asked):
        sent += connection.send(asked[sent:])


def fill(
    connection: socket.socket,
    views: list[memoryview],
    connections: Connections,
    rank: int,
    what: str,
    check: Check,
) -> None:
    """Fill all of `views` from the connection, in order.

    Stops early at a refusal, which is in the first view. Raises OSError if the connection ends, WaitTimeoutError if
    nothing comes for the timeout, and what `check` raises.
    """
    deadline, received, header = Deadline(connections.timeout_s, 0), 0, views[0]
    views = [view for view in views if len(view)]
    while views:
        try:
            count = connection.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
        except BlockingIOError:  # nothing came for `LOOK_S`
            count = -1
        if received + max(count, 0) >= LENGTH.size > received and LENGTH.unpack(header)[0] == REFUSED:
            return
        if count == 0:
            raise ConnectionError("it closed the connection")
        received += max(count, 0)
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if views:
            if count > 0:
                views[0] = views[0][count:]
            check(f"reading {what} of rank {rank}")
            if deadline.passed(received):
                raise late(connections.me, rank, what, connections.timeout_s)


def late(me: int, rank: int, what: str, timeout_s: float) -> WaitTimeoutError:
    """The error of a read that takes too long."""
    said = f"rank {me}, reading {what} of rank {rank}: nothing has come for {timeout_s:g} s"
    return WaitTimeoutError(f"{said}; raise Settings.timeout_s if it is only slow", culprit=rank)
