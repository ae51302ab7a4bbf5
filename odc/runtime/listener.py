"""The daemon's door: a unix socket at which peers and `odc status` ask, and are handed descriptors.

Chose the abstract namespace over a socket file: the address vanishes with the process, so a killed rank leaves nothing
to clean up. It has no file permissions, so each side checks the other (SO_PEERCRED) before it says anything: the same
user, in the same PID and user namespace, because user 0 of another container is somebody else. One
JSON request and one JSON reply a connection, descriptors beside the reply (SCM_RIGHTS). Nothing here ever blocks the
daemon: a visitor that stays silent costs one descriptor until its deadline. Abstract names belong to a network
namespace, so ranks in different containers of one host must share theirs.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from odc.memory import close_after_fork

MAX_REQUEST = 64 << 10
MAX_REPLY = 16 << 20
MAX_FDS = 16
VISIT_S = 1.0  # how long a visitor may take to ask, and to take its answer
_MAX_VISITS = 64
_BACKLOG = 1024
_RETRY_S = 0.002
_HEADER = struct.Struct("!I")  # length of the JSON that follows
_FDS_SPACE = socket.CMSG_SPACE(4 * MAX_FDS)
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
_NAME = re.compile(r"[!-?A-~]{1,100}")  # printable, no space, no '@' (which stands for NUL in /proc/net/unix)

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

    def stranger(self, proc: Path = Path("/proc")) -> str | None:
        """Why this is not a process of our own user and container, or None if it is.

        User ids are compared as our user namespace numbers them, so those of another namespace may look like ours; its
        processes are told apart by their links in `proc`. Where this process cannot read its own links (no procfs), a
        visible process id must do.
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
class _Visit:
    """One connection: first it is read from, then written to."""

    connection: socket.socket
    peer: PeerCredentials
    deadline: float
    asked: bytearray = field(default_factory=bytearray)
    answer: memoryview | None = None
    fds: Sequence[int] = ()


class Door:
    """Listens at `name`; drive it by calling `answer` whenever `fileno()` is readable. One thread at a time.

    A forked child closes its copy at once, so the name disappears with the process that made it.

    Args:
        name: in the abstract namespace, 1 to 100 printable characters without space and '@'.
        handler: gets a request and who asks, returns the reply and the descriptors to hand over, which stay its own.
            What it raises is told to the visitor as {"error": text}.
        visit_s: seconds a visitor may take.

    Raises:
        OSError: the name is taken.
    """

    def __init__(self, name: str, handler: Handler, visit_s: float = VISIT_S) -> None:
        self.name, self._handler, self._visit_s = name, handler, visit_s
        address = _address(name)
        self._visits: dict[int, _Visit] = {}
        self._epoll = select.epoll()  # close-on-exec; readable as soon as any of its descriptors is
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._spare = os.open(os.devnull, os.O_RDONLY)  # given up to accept one visitor when there is no other left
        try:
            self._listener.setblocking(False)
            self._listener.bind(address)
            self._listener.listen(_BACKLOG)
            self._epoll.register(self._listener, select.EPOLLIN)
        except OSError as error:
            self.close()
            raise OSError(error.errno, f"cannot open door {name!r}: {os.strerror(error.errno or 0)}") from error
        close_after_fork(self)

    def fileno(self) -> int:
        """Readable when `answer` has something to do."""
        return self._epoll.fileno()

    def answer(self) -> None:
        """Serve whoever is at the door, as far as that goes without waiting. Never raises for a bad visitor."""
        if self._epoll.closed:
            return
        for fd, events in self._epoll.poll(0):
            if fd == self._listener.fileno():
                self._accept()
            elif fd in self._visits:
                self._advance(self._visits[fd], events)
        now = time.monotonic()
        for visit in [visit for visit in self._visits.values() if visit.deadline < now]:
            self._leave(visit)

    def _accept(self) -> None:
        for _ in range(_MAX_VISITS):
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._turn_away()
                return
            try:
                self._welcome(connection)
            except OSError:
                connection.close()

    def _welcome(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        peer = PeerCredentials.of(connection)
        if peer.stranger() is not None:
            connection.close()
            return
        while len(self._visits) >= _MAX_VISITS:  # the oldest has kept silent for longest
            self._leave(next(iter(self._visits.values())))
        self._epoll.register(connection, select.EPOLLIN)
        visit = self._visits[connection.fileno()] = _Visit(connection, peer, time.monotonic() + self._visit_s)
        self._advance(visit, select.EPOLLIN)  # most have asked by now

    def _turn_away(self) -> None:
        """Out of descriptors: hang up on one visitor, or the daemon would be woken for it without end."""
        _log.warning("door %s: out of file descriptors (ulimit -n), a visitor was turned away", self.name)
        self._drop_spare()
        with contextlib.suppress(OSError):
            self._listener.accept()[0].close()
        with contextlib.suppress(OSError):  # another thread was quicker; the next visitor may find a descriptor
            self._spare = os.open(os.devnull, os.O_RDONLY)

    def _drop_spare(self) -> None:
        spare, self._spare = self._spare, -1
        if spare >= 0:
            os.close(spare)

    def _advance(self, visit: _Visit, events: int) -> None:
        try:
            if visit.answer is None and events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                self._read(visit)
            if visit.answer is not None:
                self._write(visit)
        except BlockingIOError:
            pass
        except (OSError, ValueError, RecursionError):  # gone, or not our protocol
            self._leave(visit)

    def _read(self, visit: _Visit) -> None:
        while True:
            chunk = visit.connection.recv(MAX_REQUEST)
            if not chunk:
                raise ConnectionError("hung up")
            visit.asked += chunk
            if len(visit.asked) < _HEADER.size:
                continue
            (length,) = _HEADER.unpack_from(visit.asked)
            if length > MAX_REQUEST:
                raise ValueError("request too long")
            if len(visit.asked) >= _HEADER.size + length:
                break
        request = json.loads(bytes(visit.asked[_HEADER.size : _HEADER.size + length]))
        if not isinstance(request, dict):
            raise ValueError("a request is a JSON object")
        answer, visit.fds = self._handle(request, visit.peer)
        visit.answer = memoryview(answer)
        self._epoll.modify(visit.connection, select.EPOLLOUT)

    def _handle(self, request: dict[str, Any], peer: PeerCredentials) -> tuple[bytes, Sequence[int]]:
        try:
            reply, fds = self._handler(request, peer)
            if len(fds) > MAX_FDS:
                raise ValueError(f"{len(fds)} descriptors are more than the {MAX_FDS} that a reply may carry")
            return _frame(reply), fds
        except Exception as error:
            _log.warning("door %s: request of process %d failed", self.name, peer.pid, exc_info=True)
            return _frame({"error": f"{type(error).__name__}: {error}"}), ()

    def _write(self, visit: _Visit) -> None:
        assert visit.answer is not None
        while visit.answer:
            if visit.fds:
                sent = socket.send_fds(visit.connection, [visit.answer], list(visit.fds))
                visit.fds = ()  # they travel with the first byte
            else:
                sent = visit.connection.send(visit.answer)
            visit.answer = visit.answer[sent:]
        self._leave(visit)

    def _leave(self, visit: _Visit) -> None:
        fd = visit.connection.fileno()
        if self._visits.pop(fd, None) is not None:
            # A forked child may hold a copy for a moment, and epoll forgets a socket only with its last copy.
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)
            visit.connection.close()

    def close(self) -> None:
        """Stop listening; visitors that wait are hung up on. Idempotent."""
        # Closing and nothing else: a forked child runs this too, and its copies share state with the parent's.
        for visit in self._visits.values():
            visit.connection.close()
        self._visits.clear()
        self._listener.close()
        self._epoll.close()
        self._drop_spare()


@dataclass(frozen=True)
class Answer:
    """What a door answered. Whoever knocked owns `fds`; `pid` is the process that listens, as the kernel says."""

    reply: dict[str, Any]
    fds: list[int]
    pid: int


def knock(name: str, request: dict[str, Any], timeout_s: float) -> Answer:
    """Ask the door `name` and wait for its answer, on any thread.

    Raises:
        ConnectionError: nobody listens there, it is of another user or container, or it hung up without an answer.
        TimeoutError: it did not answer within `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        fds: list[int] = []
        try:
            _connect(connection, name, deadline)
            peer = PeerCredentials.of(connection)
            stranger = peer.stranger()
            if stranger is not None:
                raise ConnectionError(stranger)
            _remain(connection, deadline)
            connection.sendall(_frame(request))
            reply = _receive(connection, deadline, fds)
        except TimeoutError as error:
            _close(fds)
            raise TimeoutError(f"door {name!r} did not answer within {timeout_s:g} s") from error
        except (OSError, ValueError) as error:
            _close(fds)
            raise ConnectionError(f"door {name!r}: {error}") from error
        return Answer(reply, fds, peer.pid)


def _connect(connection: socket.socket, name: str, deadline: float) -> None:
    address = _address(name)
    while True:
        _remain(connection, deadline)
        try:
            return connection.connect(address)
        except BlockingIOError:  # the queue of visitors is full
            time.sleep(_RETRY_S)


def _receive(connection: socket.socket, deadline: float, fds: list[int]) -> dict[str, Any]:
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
            raise ConnectionError("hung up without an answer")
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


def _remain(connection: socket.socket, deadline: float) -> None:
    """Have the next call on `connection` end at `deadline`; TimeoutError if that has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    connection.settimeout(left)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _frame(message: dict[str, Any]) -> bytes:
    text = json.dumps(message).encode()
    return _HEADER.pack(len(text)) + text


def _address(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"a door's name is 1 to 100 printable characters without space and '@', not {name!r}")
    return "\0" + name


def list_doors(prefix: str, table: Path = Path("/proc/net/unix")) -> list[str]:
    """Names that start with `prefix` and that somebody of this network namespace listens at, sorted."""
    found = set()
    for line in table.read_text().splitlines()[1:]:
        fields = line.split()  # Num RefCount Protocol Flags Type St Inode Path
        listens = len(fields) == 8 and int(fields[3], 16) & 0x10000  # __SO_ACCEPTCON
        if listens and fields[7].startswith("@" + prefix):
            found.add(fields[7][1:])
    return sorted(found)
