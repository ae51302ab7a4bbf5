"""The end of an engine that is asked: answers the reads of admitted connections from the regions that it exposes.

    reader -> operation, offset, bytes, digest of the region's name        server -> length, then as many bytes

Two threads answer any number of connections, each as far as its socket takes bytes without waiting: a reader that is
stopped holds up nobody. They sleep in epoll while nothing is asked. What lies on a device goes through pinned memory,
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
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import torch

from odc.memory import close_after_fork
from odc.runtime.engines.engine import bytes_of, hang_up, set_for_server
from odc.runtime.engines.staging import Stages

READ, DESCRIBE = b"read", b"desc"
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
        if self.rest is not None:
            self.rest.close()
        self.sock.close()


class RegionServer:
    """Answers reads of the regions that were exposed. `describe` tells what else a reader needs to know of one.

    Any thread may call any method. `stages` are for what lies on a device.
    """

    def __init__(self, describe: Callable[[str], bytes] | None = None, stages: Stages | None = None) -> None:
        self._describe, self._stages = describe, stages or Stages()
        self._regions: dict[bytes, tuple[str, torch.Tensor]] = {}
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

    def withdraw(self, region: str) -> None:
        self._regions.pop(digest(region), None)

    def adopt(self, connection: socket.socket, rank: int) -> None:
        set_for_server(connection)
        with self._lock:
            if self._closed:
                hang_up(connection)
                return
            epoll = self._epoll or self._begin()
            self._conversations[connection.fileno()] = _Conversation(connection, rank)
            epoll.register(connection, select.EPOLLIN | select.EPOLLONESHOT)

    def _begin(self) -> select.epoll:
        epoll = self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        epoll.register(self._wake, select.EPOLLIN)
        for i in range(_THREADS):
            thread = threading.Thread(target=self._serve, args=(epoll, self._wake), name=f"odc-reads-{i}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return epoll

    def close(self) -> None:
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
        if operation not in (READ, DESCRIBE):
            raise ValueError("not a request")
        region, memory = self._regions.get(name, ("", None))
        if memory is None or offset + nbytes > memory.numel():
            one.answer, one.last = [memoryview(LENGTH.pack(REFUSED))], True
            return
        found = memoryview(b"")
        if operation == DESCRIBE:
            found = memoryview(self._describe(region)) if self._describe is not None else found
        elif self._stages.needed(memory):
            one.rest = self._stages.pieces(memory[offset : offset + nbytes])
        else:
            found = bytes_of(memory)[offset : offset + nbytes]
        length = len(found) if one.rest is None else nbytes
        one.answer = [memoryview(LENGTH.pack(length)), *([found] if len(found) else [])]

    def _end(self, epoll: select.epoll, one: _Conversation) -> None:
        with self._lock:
            if self._conversations.pop(one.sock.fileno(), None) is None:
                return
            with contextlib.suppress(OSError):  # a forked child may hold a copy for a moment
                epoll.unregister(one.sock)
            one.close()


def _send(one: _Conversation) -> None:
    sent = one.sock.sendmsg([piece[:_PIECES] for piece in one.answer])
    while sent:
        first = one.answer[0]
        if sent < len(first):
            one.answer[0] = first[sent:]
            return
        sent -= len(first)
        one.answer.pop(0)
