"""The daemon's listener: a unix socket at which peers and `odc status` ask, and are handed descriptors.

It is in the abstract namespace (of the network namespace) and has no file permissions, so each side checks the other
(SO_PEERCRED) before it says anything. A connection carries one JSON request and one JSON reply, with descriptors beside
it (SCM_RIGHTS). Nothing here blocks the daemon: a silent client costs one descriptor until its deadline.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import select
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from odc.deadlines import CONNECTION_S, LISTENER_RETRY_S, Backoff, Deadline
from odc.memory import close_after_fork
from odc.net.accepting import Acceptor

MAX_REQUEST = 64 << 10
MAX_REPLY = 16 << 20
MAX_FDS = 16
_MAX_CONNECTIONS = 64
_BACKLOG = 1024
_HEADER = struct.Struct("!I")  # length of the JSON that follows
_FDS_SPACE = socket.CMSG_SPACE(4 * MAX_FDS)
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
_ADDRESS = re.compile(r"[!-?A-~]{1,100}")  # printable, no space, no '@' (which stands for NUL in /proc/net/unix)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PeerCredentials:
    """Who is at the other end of a connection, as the kernel says: process id and user id."""

    pid: int
    uid: int

    @classmethod
    def of(cls, connection: socket.socket) -> PeerCredentials:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(raw)
        return cls(pid, uid)

    def refusal(self, proc: Path = Path("/proc")) -> str | None:
        """Why this is not a process of our own user and container, or None if it is.

        User ids are compared as our user namespace numbers them; processes of other namespaces are told apart by their
        links in `proc`. Where this process cannot read its own links (no procfs), a visible process id must do.
        """
        if self.uid != os.geteuid():
            return f"it belongs to user {self.uid}, not to user {os.geteuid()}"
        if self.pid <= 0:
            return "its process is in another PID namespace; ranks of one host must share theirs"
        for kind in ("pid", "user"):
            try:
                own = os.readlink(proc / "self" / "ns" / kind)
            except OSError:
                continue
            try:
                other = os.readlink(proc / str(self.pid) / "ns" / kind)
            except OSError as error:
                return f"the {kind} namespace of its process {self.pid} cannot be read ({error.strerror})"
            if own != other:
                return f"its process {self.pid} is in another {kind} namespace; ranks of one host must share theirs"
        return None


Handler = Callable[[dict[str, Any], PeerCredentials], tuple[dict[str, Any], Sequence[int]]]


@dataclass
class _Connection:
    sock: socket.socket
    peer: PeerCredentials
    deadline: Deadline
    asked: bytearray = field(default_factory=bytearray)
    answer: memoryview | None = None
    fds: Sequence[int] = ()


class Listener:
    """Listens at `address`; drive it by calling `answer` whenever `fileno()` is readable. One thread at a time.

    A forked child closes its copy at once, so the address disappears with the process that made it.

    Args:
        address: in the abstract namespace, 1 to 100 printable characters without space and '@'; OSError if it is taken.
        handler: gets a request and who asks; returns the reply and the descriptors to hand over, which it still owns.
            An exception that it raises is told to the client as {"error": text}.
        connection_s: seconds a client may take.
    """

    def __init__(self, address: str, handler: Handler, connection_s: float = CONNECTION_S) -> None:
        abstract = _abstract(address)
        self.address, self._handler, self._connection_s = address, handler, connection_s
        self._connections: dict[int, _Connection] = {}
        self._epoll = select.epoll()  # close-on-exec; readable as soon as any of its descriptors is
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._acceptor: Acceptor | None = None
        try:
            self._socket.setblocking(False)
            self._socket.bind(abstract)
            self._socket.listen(_BACKLOG)
            self._acceptor = Acceptor(self._socket, self._epoll, address)
        except OSError as error:
            self.close()
            raise OSError(error.errno, f"cannot listen at {address!r}: {os.strerror(error.errno or 0)}") from error
        close_after_fork(self)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def answer(self) -> None:
        """Serve every connection as far as that goes without waiting. Never raises for a bad client."""
        if self._epoll.closed:
            return
        for fd, events in self._epoll.poll(0):
            if fd == self._socket.fileno():
                self._accept()
            elif fd in self._connections:
                self._advance(self._connections[fd], events)
        for late in [one for one in self._connections.values() if one.deadline.passed()]:
            self._end(late)

    def _accept(self) -> None:
        assert self._acceptor is not None
        for accepted in self._acceptor.accept(_MAX_CONNECTIONS):
            try:
                self._begin(accepted)
            except OSError:
                accepted.close()

    def _begin(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        peer = PeerCredentials.of(accepted)
        if peer.refusal() is not None:
            accepted.close()
            return
        while len(self._connections) >= _MAX_CONNECTIONS:  # the oldest has kept silent for longest
            self._end(next(iter(self._connections.values())))
        self._epoll.register(accepted, select.EPOLLIN)
        connection = _Connection(accepted, peer, Deadline(self._connection_s))
        self._connections[accepted.fileno()] = connection
        self._advance(connection, select.EPOLLIN)  # most have asked by now

    def _advance(self, connection: _Connection, events: int) -> None:
        try:
            if connection.answer is None and events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                self._read(connection)
            if connection.answer is not None:
                self._write(connection)
        except BlockingIOError:
            pass
        except (OSError, ValueError, RecursionError):  # gone, or not our protocol
            self._end(connection)

    def _read(self, connection: _Connection) -> None:
        while True:
            chunk = connection.sock.recv(MAX_REQUEST)
            if not chunk:
                raise ConnectionError("hung up")
            connection.asked += chunk
            if len(connection.asked) < _HEADER.size:
                continue
            (length,) = _HEADER.unpack_from(connection.asked)
            if length > MAX_REQUEST:
                raise ValueError("request too long")
            if len(connection.asked) >= _HEADER.size + length:
                break
        request = json.loads(bytes(connection.asked[_HEADER.size : _HEADER.size + length]))
        if not isinstance(request, dict):
            raise ValueError("a request is a JSON object")
        answer, connection.fds = self._handle(request, connection.peer)
        connection.answer = memoryview(answer)
        self._epoll.modify(connection.sock, select.EPOLLOUT)

    def _handle(self, request: dict[str, Any], peer: PeerCredentials) -> tuple[bytes, Sequence[int]]:
        try:
            reply, fds = self._handler(request, peer)
            if len(fds) > MAX_FDS:
                raise ValueError(f"{len(fds)} descriptors are more than the {MAX_FDS} that a reply may carry")
            return _frame(reply), fds
        except Exception as error:
            _log.warning("listener %s: request of process %d failed", self.address, peer.pid, exc_info=True)
            return _frame({"error": f"{type(error).__name__}: {error}"}), ()

    def _write(self, connection: _Connection) -> None:
        assert connection.answer is not None
        while connection.answer:
            if connection.fds:
                sent = socket.send_fds(connection.sock, [connection.answer], list(connection.fds))
                connection.fds = ()  # they travel with the first byte
            else:
                sent = connection.sock.send(connection.answer)
            connection.answer = connection.answer[sent:]
        self._end(connection)

    def _end(self, connection: _Connection) -> None:
        fd = connection.sock.fileno()
        if self._connections.pop(fd, None) is not None:
            # A forked child may hold a copy for a moment, and epoll forgets a socket only with its last copy.
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)
            connection.sock.close()

    def close(self) -> None:
        """Stop listening; clients that wait are hung up on. Idempotent."""
        # Closing and nothing else: a forked child runs this too, and its copies share state with the parent's.
        for connection in self._connections.values():
            connection.sock.close()
        self._connections.clear()
        self._socket.close()
        self._epoll.close()
        if self._acceptor is not None:
            self._acceptor.close()


class NoAnswerError(ConnectionError):
    """The listener hung up: it ends, or it waited for this process, which was stopped, for longer than a client may
    take. Whoever asks again finds out which.
    """


@dataclass(frozen=True)
class Answer:
    """What a listener answered. Whoever asked owns `fds`; `pid` is the process that listens, as the kernel says."""

    reply: dict[str, Any]
    fds: list[int]
    pid: int


def ask(address: str, request: dict[str, Any], timeout_s: float) -> Answer:
    """Ask the listener at `address` and wait for its answer, on any thread.

    Raises ConnectionError if nobody listens there or it is of another user or container, NoAnswerError if it hung up
    without an answer, TimeoutError if it did not answer within `timeout_s` seconds.
    """
    deadline = Deadline(timeout_s)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        fds: list[int] = []
        try:
            _connect(connection, address, deadline)
            peer = PeerCredentials.of(connection)
            refusal = peer.refusal()
            if refusal is not None:
                raise ConnectionError(refusal)
            _remain(connection, deadline)
            connection.sendall(_frame(request))
            reply = _receive(connection, deadline, fds)
        except TimeoutError as error:
            _close(fds)
            raise TimeoutError(f"listener {address!r} did not answer within {timeout_s:g} s") from error
        except (OSError, ValueError) as error:
            _close(fds)
            hung_up = isinstance(error, ConnectionResetError | BrokenPipeError)
            raise (NoAnswerError if hung_up else ConnectionError)(f"listener {address!r}: {error}") from error
        return Answer(reply, fds, peer.pid)


def _connect(connection: socket.socket, address: str, deadline: Deadline) -> None:
    abstract, backoff = _abstract(address), Backoff(LISTENER_RETRY_S, LISTENER_RETRY_S)
    while True:
        _remain(connection, deadline)
        try:
            return connection.connect(abstract)
        except BlockingIOError:  # the queue of connections is full
            backoff.sleep()


def _receive(connection: socket.socket, deadline: Deadline, fds: list[int]) -> dict[str, Any]:
    """The reply; received descriptors are appended to `fds` at once, so that none leaks."""
    raw = bytearray()
    wanted = _HEADER.size
    while len(raw) < wanted:
        _remain(connection, deadline)
        # Not socket.recv_fds: it drops the flag, and the descriptors would be inherited by whatever this rank starts.
        chunk, ancillary, flags, _ = connection.recvmsg(1 << 16, _FDS_SPACE, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds += memoryview(data[: len(data) // 4 * 4]).cast("i")
        if not chunk:
            raise ConnectionResetError("hung up without an answer")
        if flags & socket.MSG_CTRUNC:
            raise ConnectionError("descriptors were lost on the way: too many are open here (ulimit -n)")
        raw += chunk
        if len(raw) >= _HEADER.size:
            wanted = _HEADER.size + _HEADER.unpack_from(raw)[0]
            if wanted > MAX_REPLY:
                raise ValueError(f"its answer is too long: {wanted} bytes")
    reply = json.loads(bytes(raw[_HEADER.size : wanted]))
    if not isinstance(reply, dict):
        raise ValueError("its answer is no JSON object")
    return reply


def _remain(connection: socket.socket, deadline: Deadline) -> None:
    """Have the next call on `connection` end at `deadline`; TimeoutError if that has passed."""
    left = deadline.remaining()
    if left <= 0:
        raise TimeoutError
    connection.settimeout(left)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _frame(message: dict[str, Any]) -> bytes:
    text = json.dumps(message).encode()
    return _HEADER.pack(len(text)) + text


def _abstract(address: str) -> str:
    if not _ADDRESS.fullmatch(address):
        raise ValueError(f"an address is 1 to 100 printable characters without space and '@', not {address!r}")
    return "\0" + address


def list_listeners(prefix: str, table: Path = Path("/proc/net/unix")) -> list[str]:
    """Addresses that start with `prefix` at which a process of this network namespace listens, sorted."""
    found = set()
    for line in table.read_text().splitlines()[1:]:
        fields = line.split()  # Num RefCount Protocol Flags Type St Inode Path
        listens = len(fields) == 8 and int(fields[3], 16) & 0x10000  # __SO_ACCEPTCON
        if listens and fields[7].startswith("@" + prefix):
            found.add(fields[7][1:])
    return sorted(found)
