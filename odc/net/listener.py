"""Accepts connections, on a Unix or a TCP socket, and holds one conversation on each until its end is known.

The reactor drives it and nothing here waits: a silent connection costs one descriptor until its deadline. While many
are pending no more are accepted: these wait in the backlog of the kernel. In the abstract namespace a Unix listener has
no file permissions, so the conversation has to find out whether the other end may be heard.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Generic

from odc.deadlines import ACCEPT_PAUSE_S, CONVERSATION_S, Deadline
from odc.memory import close_after_fork
from odc.net.conversation import Conversation, HungUpError, T
from odc.net.reactor import Reactor, Registration

_MOST_PENDING = 64
_BACKLOG = 1024
_PIECE = 1 << 16
_ADDRESS = re.compile(r"[!-?A-~]{1,100}")  # printable, no space, no '@' (which stands for NUL in /proc/net/unix)
_RUN_OUT = {  # here, whatever the other end does
    errno.EMFILE: "raise this process's limit of open files (ulimit -n)",
    errno.ENFILE: "raise this machine's limit of open files (sysctl fs.file-max)",
    errno.ENOBUFS: "this machine has no memory for sockets: raise sysctl net.core.wmem_max and net.ipv4.tcp_mem",
    errno.ENOMEM: "this machine has no memory left",
}

_log = logging.getLogger(__name__)


def remedy(error: OSError, otherwise: str) -> str:
    """What to do about an error of opening or listening: `otherwise`, unless this machine has run out of something."""
    return _RUN_OUT.get(error.errno or 0, otherwise)


class _Pending(Generic[T]):
    """One connection whose conversation goes on."""

    def __init__(self, connection: socket.socket, conversation: Conversation[T], limit_s: float) -> None:
        self.connection, self.conversation, self.deadline = connection, conversation, Deadline(limit_s)
        self.turn = next(conversation)
        self.unsent, self.fds = memoryview(self.turn.data), self.turn.fds
        self.received = bytearray()
        self.waiting: Registration | None = None
        self.waits_to_send = False

    def advance(self) -> None:
        """Go on until the socket would block, which raises BlockingIOError, or the end, which raises StopIteration with
        the result.
        """
        while True:
            while self.unsent:
                # Descriptors travel with the first byte.
                sent = socket.send_fds(self.connection, [self.unsent], self.fds)
                self.unsent, self.fds = self.unsent[sent:], ()
            while (missing := self.turn.wanted - len(self.received)) > 0:
                data = self.connection.recv(min(missing, _PIECE))
                if not data:
                    raise HungUpError("hung up")
                self.received += data
            data, self.received = bytes(self.received), bytearray()
            self.turn = self.conversation.send(data)
            self.unsent, self.fds = memoryview(self.turn.data), self.turn.fds


class Listener(Generic[T]):
    """Listens on `listening`, a bound socket that it owns; `name` is for the log.

    `begin(connection)` makes the conversation that is held on a new connection, or raises OSError to refuse it.
    `welcome(connection, result)`, called on the loop's thread when the conversation is over, owns the connection, which
    is blocking then. A forked child closes its copies at once.
    """

    def __init__(
        self,
        reactor: Reactor,
        listening: socket.socket,
        name: str,
        begin: Callable[[socket.socket], Conversation[T]],
        welcome: Callable[[socket.socket, T], None],
        limit_s: float = CONVERSATION_S,
    ) -> None:
        self._reactor, self._socket, self._name = reactor, listening, name
        self._begin, self._welcome, self._limit_s = begin, welcome, limit_s
        self._pending: dict[int, _Pending[T]] = {}  # by descriptor, the oldest first
        self._accepting: Registration | None = None
        self._sweeps = self._paused = False
        listening.setblocking(False)
        listening.listen(_BACKLOG)
        close_after_fork(self)
        reactor.call(self._resume)

    def _resume(self) -> None:
        if self._accepting is None and self._socket.fileno() >= 0:
            self._accepting = self._reactor.on_readable(self._socket.fileno(), self._accept)

    def _stop_accepting(self) -> None:
        """Leave connections in the backlog, without being woken for them, until `_resume`."""
        if self._accepting is not None:
            self._accepting.cancel()
            self._accepting = None

    def _accept(self) -> None:
        for _ in range(_MOST_PENDING):
            if len(self._pending) >= _MOST_PENDING:
                self._stop_accepting()
                return
            try:
                accepted, _ = self._socket.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                self._pause(error)
                return
            self._paused = False
            self._take(accepted)

    def _pause(self, error: OSError) -> None:
        """Accept nothing for a moment: the loop would be woken without end for what cannot be accepted."""
        if not self._paused:
            why = remedy(error, str(error))
            _log.warning("listener %s cannot accept connections, which wait: %s", self._name, why)
        self._paused = True
        self._stop_accepting()
        self._reactor.call(self._resume, after_s=ACCEPT_PAUSE_S)

    def _take(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        try:
            one = _Pending(accepted, self._begin(accepted), self._limit_s)
        except OSError:
            accepted.close()
            return
        self._pending[accepted.fileno()] = one
        self._advance(one)

    def _advance(self, one: _Pending[T]) -> None:
        try:
            one.advance()
        except BlockingIOError:
            self._wait(one)
        except StopIteration as end:
            self._hand_over(self._release(one), end.value)
        except (OSError, ValueError, RecursionError):  # gone, or not odc's protocol
            self._release(one).close()

    def _hand_over(self, connection: socket.socket, result: T) -> None:
        try:
            connection.setblocking(True)
            self._welcome(connection, result)
        except OSError as error:
            connection.close()
            why = remedy(error, str(error))
            _log.warning("listener %s ends a connection that it has accepted: %s", self._name, why)

    def _wait(self, one: _Pending[T]) -> None:
        to_send = bool(one.unsent)
        if one.waiting is None or one.waits_to_send != to_send:
            if one.waiting is not None:
                one.waiting.cancel()
            register = self._reactor.on_writable if to_send else self._reactor.on_readable
            one.waits_to_send = to_send
            one.waiting = register(one.connection.fileno(), lambda: self._advance(one))
        self._sweep_later()

    def _sweep_later(self) -> None:
        if not self._sweeps and self._pending:
            self._sweeps = True
            oldest = next(iter(self._pending.values()))
            self._reactor.call(self._sweep, after_s=max(1e-3, oldest.deadline.remaining()))

    def _sweep(self) -> None:
        self._sweeps = False
        for late in [one for one in self._pending.values() if one.deadline.passed()]:
            self._release(late).close()
        self._sweep_later()

    def _release(self, one: _Pending[T]) -> socket.socket:
        self._pending.pop(one.connection.fileno(), None)
        if one.waiting is not None:
            one.waiting.cancel()
        self._resume()  # where too many were pending, or descriptors had run out
        return one.connection

    def close(self) -> None:
        """Stop listening and end the conversations; idempotent. Changes nothing that a forked child shares."""
        self._stop_accepting()
        self._socket.close()  # first, or a release would resume accepting
        for one in list(self._pending.values()):
            self._release(one).close()


def bind_unix(address: str) -> socket.socket:
    """A socket at `address` in the abstract namespace: 1 to 100 printable characters without space and '@'.

    OSError if it is taken.
    """
    where, made = abstract(address), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.bind(where)
    except OSError as error:
        made.close()
        raise OSError(error.errno, f"cannot listen at {address!r}: {os.strerror(error.errno or 0)}") from error
    return made


def abstract(address: str) -> str:
    """As the kernel names it; ValueError if it is none."""
    if not _ADDRESS.fullmatch(address):
        raise ValueError(f"an address is 1 to 100 printable characters without space and '@', not {address!r}")
    return "\0" + address


def list_listeners(prefix: str, table: Path = Path("/proc/net/unix")) -> list[str]:
    """Addresses that start with `prefix` at which a process of this network namespace listens, sorted."""
    found = set()
    for line in table.read_bytes().split(b"\n")[1:]:  # any process may listen at any bytes
        fields = line.decode("ascii", "replace").split()  # Num RefCount Protocol Flags Type St Inode Path
        listens = len(fields) == 8 and fields[3] == "00010000"  # __SO_ACCEPTCON
        if listens and fields[7].startswith("@" + prefix):
            found.add(fields[7][1:])
    return sorted(found)
