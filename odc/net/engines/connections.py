"""Connections to the engines of other ranks: lent to one thread at a time, and what that thread hears on one."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from odc.deadlines import NIXL_FIRST_SLEEP_S, NIXL_LONGEST_SLEEP_S, POOL_CHECK_S, READ_CHECK_S, Backoff, Deadline
from odc.errors import PeerLostError, WaitTimeoutError
from odc.memory import close_after_fork
from odc.net.engines.server import LENGTH, REFUSED
from odc.net.handshake import READER
from odc.net.tcp import hang_up, set_for_reader

_LEAST_PER_WAKE, _MOST_PER_WAKE = 1 << 16, 1 << 19  # bytes that come before a thread that reads is woken

T = TypeVar("T")

#: Raises if the job was aborted, given what this rank is doing.
Check = Callable[[str], None]
#: Connects to the engine of a rank (global); tries again, and raises, as `HostNetwork.dial` does.
Dial = Callable[[int, Check], socket.socket]


def no_check(doing: str) -> None:
    """Check nothing."""


@dataclass
class Answers:
    """What `rank` answers on one connection to one thread of rank `me`, which reads `what`."""

    me: int
    rank: int
    timeout_s: float
    what: str
    check: Check
    connection: socket.socket = field(init=False)

    def check_on(self) -> None:
        """Raise what `check` raises."""
        self.check(f"reading {self.what} of rank {self.rank}")

    def refuse_dead(self) -> None:
        """Raise OSError if the other end of the connection, on which nothing is expected, has ended."""
        try:
            found = self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        raise ConnectionError("it closed the connection" if not found else "it sent unexpected data")

    def outcome(self, look: Callable[[], T | None], due: float = 0.0) -> T:
        """What `look` finds, which finds None while a transfer goes on that nothing announces. Sleeps until the
        transfer is `due` (`time.monotonic`); from then on, it polls. Raises as `refuse_dead`, what `check` raises, and
        WaitTimeoutError after the timeout.
        """
        deadline, next_check = Deadline(self.timeout_s), Deadline(READ_CHECK_S)
        backoff = Backoff(NIXL_FIRST_SLEEP_S, NIXL_LONGEST_SLEEP_S)
        while (found := look()) is None:
            early = min(due - time.monotonic(), next_check.remaining())
            if early > NIXL_FIRST_SLEEP_S:
                time.sleep(early)
            else:
                backoff.sleep()
            if next_check.passed():
                next_check = Deadline(READ_CHECK_S)
                self.refuse_dead()
                self.check_on()
                if deadline.passed():
                    raise self.late("it has not ended after")
        return found

    def lost(self, why: object) -> PeerLostError:
        """The error of a read that found the other rank gone."""
        return PeerLostError(f"{self._reading()}: {why}", culprit=self.rank)

    def refused(self, region: str, offset: int, nbytes: int) -> PeerLostError:
        """The error of a read of bytes that the other rank does not expose."""
        return self.lost(f"it exposes no {nbytes} bytes at {offset} of {region!r} (any more)")

    def late(self, how: str = "nothing has come for") -> WaitTimeoutError:
        """The error of a read that takes too long."""
        text = f"{self._reading()}: {how} {self.timeout_s:g} s"
        return WaitTimeoutError(f"{text}; raise Settings.timeout_s if it is only slow", culprit=self.rank)

    def _reading(self) -> str:
        reader = "reader" if self.me == READER else f"rank {self.me}"
        return f"{reader}, reading {self.what} of rank {self.rank}"

    def send(self, request: bytes) -> None:
        """Send a request. It is short: this waits only if this host's own network is stuck."""
        sent = 0
        while sent < len(request):
            sent += self.connection.send(request[sent:])

    def await_answer(self, into: memoryview) -> int:
        """Fill `into` with the answer to the oldest request; returns the length that the rank answers.

        At `REFUSED` the connection has ended and `into` is as it was. Raises as `receive`.
        """
        header = bytearray(LENGTH.size)
        self._fill([memoryview(header), into], header)
        return int(LENGTH.unpack(header)[0])

    def ask(self, request: bytes, into: memoryview) -> int:
        """`send` and `await_answer`."""
        self.send(request)
        return self.await_answer(into)

    def receive(self, into: memoryview) -> None:
        """Fill `into`. Raises OSError if the connection ends, WaitTimeoutError if nothing comes for the timeout, and
        what `check` raises.
        """
        self._fill([into])

    def _fill(self, views: list[memoryview], header: bytearray | None = None) -> None:
        deadline, received = Deadline(self.timeout_s, 0), 0
        views = [view for view in views if len(view)]
        while views:
            try:
                count = self.connection.recvmsg_into(self._next(views), 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:  # nothing came for READ_CHECK_S
                count = -1
            received += max(count, 0)
            if header is not None and received >= LENGTH.size and LENGTH.unpack(header)[0] == REFUSED:
                return
            if count == 0:
                raise ConnectionError("it closed the connection")
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if views:
                if count > 0:
                    views[0] = views[0][count:]
                self.check_on()
                if deadline.passed(received):
                    raise self.late()

    def _next(self, views: list[memoryview]) -> list[memoryview]:
        """What to receive in one call, of all that is awaited: the thread is woken when much has come, not by each
        packet. At least as much is left to later calls: with less to come than wakes it, it would sleep on.
        """
        last = views[-1]
        wake = min(len(last) // 4, _MOST_PER_WAKE)
        if wake < _LEAST_PER_WAKE:
            wake = 0
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, max(1, wake))
        return [*views[:-1], last[: len(last) - wake]]


class NoneFree(Exception):  # no error: the caller does something else first
    """All connections to a rank are lent to other threads, or to other reads of this one."""


class Connections:
    """Connections to the servers of other ranks, at most so many to one, each lent to one thread at a time."""

    def __init__(self, me: int, dial: Dial, timeout_s: float, lost_after_s: float, most: int) -> None:
        self._me, self._timeout_s, self._lost_after_s = me, timeout_s, lost_after_s
        self._dial, self._most = dial, most
        self._changed = threading.Condition()
        self._idle: dict[int, list[socket.socket]] = {}
        self._all: dict[int, set[socket.socket]] = {}
        self._pending: dict[int, int] = {}  # being made
        self._closed = False
        close_after_fork(self)

    @contextlib.contextmanager
    def lend(self, rank: int, what: str, check: Check, *, wait: bool = True) -> Iterator[Answers]:
        """A connection to `rank` that no other thread uses, for the block; one that raises ends the connection.

        `what` and `check` are as in `Engine.read`. OSError becomes PeerLostError. Raises `NoneFree` where all are lent,
        unless it is to `wait` for one.
        """
        answers = Answers(self._me, rank, self._timeout_s, what, check)
        connection = answers.connection = self._take(answers, wait)
        try:
            yield answers
        except BaseException as error:
            with self._changed:
                self._all.get(rank, set()).discard(connection)
                hang_up(connection)
                self._changed.notify_all()
            if isinstance(error, OSError):
                raise answers.lost(error) from error
            raise
        with self._changed:
            if connection in self._all.get(rank, ()):
                self._idle.setdefault(rank, []).append(connection)
            self._changed.notify_all()

    def _take(self, answers: Answers, wait: bool) -> socket.socket:
        deadline, rank = Deadline(self._timeout_s), answers.rank
        with self._changed:
            while True:
                if self._closed:
                    raise answers.lost("this rank's engine is closed")
                if idle := self._idle.get(rank):
                    return idle.pop()
                if len(self._all.get(rank, ())) + self._pending.get(rank, 0) < self._most:
                    self._pending[rank] = self._pending.get(rank, 0) + 1
                    break
                if not wait:
                    raise NoneFree
                self._changed.wait(POOL_CHECK_S)
                answers.check_on()
                if deadline.passed():
                    raise answers.late()
        made: socket.socket | None = None
        try:
            connection = self._dial(rank, lambda doing: answers.check_on())
            set_for_reader(connection, self._lost_after_s)
            made = connection
        except OSError as error:
            raise answers.lost(f"no connection to it ({error})") from error
        finally:
            with self._changed:
                self._pending[rank] -= 1
                if made is not None:
                    self._all.setdefault(rank, set()).add(made)
                self._changed.notify_all()
        return made

    def close(self) -> None:
        self._closed = True  # without the lock, which a thread of a forked child's parent may hold
        for some in list(self._all.values()):
            for connection in list(some):
                connection.close()
