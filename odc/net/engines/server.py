"""The end of an engine that is asked: answers admitted connections from the regions that it exposes, or by a function.

    reader -> operation, offset, bytes, digest of the name        server -> length, then as many bytes

Two threads answer any number of connections, each as far as its socket takes bytes without waiting: a reader that is
stopped holds up no other. They sleep in epoll while nothing is asked. What lies on a device goes through pinned memory,
some chunks at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field

import torch

from odc.memory import close_after_fork
from odc.net.engines.staging import Stages, bytes_of
from odc.net.tcp import hang_up, set_for_server

READ, DESCRIBE, ASK = b"read", b"desc", b"call"
REQUEST = struct.Struct("!4sQQ16s")
LENGTH = struct.Struct("!Q")
REFUSED = (1 << 64) - 1  # in place of a length: the bytes are not exposed; the connection ends
_THREADS = 2
_PIECES = 1 << 30  # of one send

_log = logging.getLogger(__name__)


def digest(region: str) -> bytes:
    """How a request names a region."""
    return hashlib.blake2b(region.encode(), digest_size=16).digest()


def request(operation: bytes, region: str, offset: int = 0, nbytes: int = 0) -> bytes:
    """What a reader sends."""
    return REQUEST.pack(operation, offset, nbytes, digest(region))


@dataclass
class _Conversation:
    sock: socket.socket
    rank: int
    allowed: dict[bytes, range] | None  # of a process outside the job: by digest of a name, the bytes it may read
    asked: bytearray = field(default_factory=bytearray)
    answer: list[memoryview] = field(default_factory=list)
    rest: Generator[memoryview] | None = None  # what follows it
    last: bool = False  # end once the answer is sent

    def more(self) -> bool:
        """Whether there is anything left to send; the next piece is then in `answer`."""
        if not self.answer and self.rest is not None:
            piece = next(self.rest, None)
            if piece is None:
                self.rest = None
            else:
                self.answer = [piece]
        return bool(self.answer)

    def close(self) -> None:
        self.sock.close()  # first: a thread may be in `rest`, which a forked child cannot close then
        if self.rest is not None:
            with contextlib.suppress(ValueError):  # of a forked child
                self.rest.close()


class RegionServer:
    """Answers reads of the regions that were exposed. `describe` gives what else a reader needs to know of one.

    Any thread may call any method. `stages` are for what lies on a device.
    """

    def __init__(self, lost_after_s: float, describe: Callable[[str], bytes] | None, stages: Stages) -> None:
        self._lost_after_s, self._describe, self._stages = lost_after_s, describe, stages
        self._regions: dict[bytes, tuple[str, torch.Tensor]] = {}
        self._functions: dict[bytes, Callable[[], bytes]] = {}
        self._lock = threading.Lock()
        self._conversations: dict[int, _Conversation] = {}
        self._epoll: select.epoll | None = None
        self._wake = -1
        self._threads: list[threading.Thread] = []
        self._closed, self._pid = False, os.getpid()
        close_after_fork(self)

    def expose(self, region: str, memory: torch.Tensor) -> None:
        if digest(region) in self._regions:
            raise ValueError(f"region {region!r} is exposed already")
        if self._stages.needed(memory):
            self._stages.prepare(memory.device)
        self._regions[digest(region)] = region, memory

    def answer(self, name: str, function: Callable[[], bytes]) -> None:
        if digest(name) in self._functions:
            raise ValueError(f"{name!r} is answered already")
        self._functions[digest(name)] = function

    def withdraw(self, name: str) -> None:
        self._regions.pop(digest(name), None)
        self._functions.pop(digest(name), None)

    def adopt(self, connection: socket.socket, rank: int, only: Mapping[str, range] | None = None) -> None:
        allowed = None if only is None else {digest(name): within for name, within in only.items()}
        set_for_server(connection, self._lost_after_s)
        with self._lock:
            if self._closed:
                hang_up(connection)
                return
            epoll = self._epoll or self._begin()
            self._conversations[connection.fileno()] = _Conversation(connection, rank, allowed)
            epoll.register(connection, select.EPOLLIN | select.EPOLLONESHOT)

    def _begin(self) -> select.epoll:
        epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        epoll.register(self._wake, select.EPOLLIN)
        self._epoll = epoll  # not before: without a descriptor for `_wake` the next connection begins anew
        for i in range(_THREADS):
            thread = threading.Thread(target=self._serve, args=(epoll, self._wake), name=f"odc-reads-{i}", daemon=True)
            thread.start()
            self._threads.append(thread)
        return epoll

    def close(self) -> None:
        # A connection is adopted before, or ended. Not by a forked child, whose parent may hold the lock.
        with self._lock if os.getpid() == self._pid else contextlib.nullcontext():
            self._closed = True
        wake, self._wake = self._wake, -1
        if wake < 0:
            return
        if os.getpid() == self._pid:  # a forked child has the descriptors and no threads
            os.eventfd_write(wake, 1)  # level-triggered, so every thread sees it
            for thread in self._threads:
                if thread is not threading.current_thread():
                    thread.join()
        for one in list(self._conversations.values()):
            one.close()
        self._conversations.clear()
        assert self._epoll is not None
        self._epoll.close()
        os.close(wake)
        self._regions.clear()
        self._functions.clear()

    # the threads -------------------------------------------------------------------------------------------------

    def _serve(self, epoll: select.epoll, wake: int) -> None:
        while not self._closed:
            for fd, _ in epoll.poll(None, 1):
                one = self._conversations.get(fd)
                if fd == wake or one is None:
                    continue
                try:
                    wanted = self._advance(one)
                    epoll.modify(fd, wanted | select.EPOLLONESHOT)
                except (OSError, ValueError):  # it hung up, or does not speak this protocol
                    self._end(epoll, one)
                except Exception:
                    _log.exception("a read of rank %d cannot be answered", one.rank)
                    self._end(epoll, one)

    def _advance(self, one: _Conversation) -> int:
        """Go on until a socket would block; returns what to wait for. Raises OSError or ValueError at the end."""
        try:
            while True:
                if one.more():
                    _send(one)
                    continue
                if one.last:
                    raise ConnectionError("refused")
                chunk = one.sock.recv(REQUEST.size - len(one.asked))
                if not chunk:
                    raise ConnectionError("hung up")
                one.asked += chunk
                if len(one.asked) == REQUEST.size:
                    self._answer(one, bytes(one.asked))
                    one.asked.clear()
        except BlockingIOError:
            return select.EPOLLOUT if one.answer else select.EPOLLIN

    def _answer(self, one: _Conversation, asked: bytes) -> None:
        operation, offset, nbytes, name = REQUEST.unpack(asked)
        if one.allowed is not None and not _allows(one.allowed, operation, name, offset, nbytes):
            _refuse(one)
            return
        if operation == ASK:
            function = self._functions.get(name)
            if function is None:
                _refuse(one)
            else:
                _frame(one, memoryview(function()))
            return
        if operation not in (READ, DESCRIBE):
            raise ValueError("not a request")
        region, memory = self._regions.get(name, ("", None))
        if memory is None or offset + nbytes > memory.numel():
            _refuse(one)
            return
        if operation == READ and self._stages.needed(memory):
            one.rest = self._stages.pieces(memory[offset : offset + nbytes])
            one.answer = [memoryview(LENGTH.pack(nbytes))]
        elif operation == READ:
            _frame(one, bytes_of(memory)[offset : offset + nbytes])
        else:
            _frame(one, memoryview(b"" if self._describe is None else self._describe(region)))

    def _end(self, epoll: select.epoll, one: _Conversation) -> None:
        with self._lock:
            if self._conversations.pop(one.sock.fileno(), None) is None:
                return
            with contextlib.suppress(OSError):  # a forked child may hold a copy for a moment
                epoll.unregister(one.sock)
            one.close()


def _allows(allowed: Mapping[bytes, range], operation: bytes, name: bytes, offset: int, nbytes: int) -> bool:
    """Whether a process outside the job may ask for this. The answer to DESCRIBE would open the whole region."""
    within = allowed.get(name)
    if within is None or operation == DESCRIBE:
        return False
    return operation != READ or within.start <= offset <= offset + nbytes <= within.stop


def _refuse(one: _Conversation) -> None:
    """Answer that the bytes are not exposed, and end the connection."""
    one.answer, one.last = [memoryview(LENGTH.pack(REFUSED))], True


def _frame(one: _Conversation, found: memoryview) -> None:
    one.answer = [memoryview(LENGTH.pack(len(found))), *([found] if len(found) else [])]


def _send(one: _Conversation) -> None:
    sent = one.sock.sendmsg([piece[:_PIECES] for piece in one.answer])
    while sent:
        first = one.answer[0]
        if sent < len(first):
            one.answer[0] = first[sent:]
            return
        sent -= len(first)
        one.answer.pop(0)
