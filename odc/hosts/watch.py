"""Notices that a rank on another host ends before any root is linked to it.

From its first sharded module on, a rank keeps a connection to the rank with its index on the host before and on the
host after its own, as torchrun numbers them: a ring of each index. Each end says that it watches, and good-bye as it
shuts down. An end between the two is a death, which goes around the ring, and into the job's store for ranks that wait
there. Once a root has a link, that tells of it.

Both ends of a pair store where they listen before they look for the other, so at least one of them finds it. A rank
that ends before that, or before its first sharded module, is missed. A neighbour that cannot be reached is not taken
for dead: with `Settings(address=...)` on the root alone it may be well.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from odc.deadlines import STORE_ENDING_S, STORE_LEAST_S
from odc.errors import OdcError, UnsupportedError
from odc.memory import close_after_fork
from odc.net.address import own_address
from odc.net.admission import job_secret
from odc.net.frames import Frame, FrameKind, FrameReader, MalformedFrameError
from odc.net.host_link import HostLink, side_to_blame
from odc.net.network import connect
from odc.net.reception import Reception
from odc.net.store import JobStore, announce_failure
from odc.protocol.peers.board import REASON_BYTES
from odc.protocol.words import BOARD_WORDS, Word
from odc.settings import Settings

PURPOSE = "watch"
_LIMITS = {FrameKind.WORD: 0, FrameKind.REASON: REASON_BYTES}

#: Given the rank that ended, why, and the rank to blame.
Ended = Callable[[int, str, int], None]


def neighbours(rank: int) -> list[int]:
    """The ranks with the index of `rank` on the hosts before and after its own; none on one host, or where no launcher
    has said how many ranks a host has.
    """
    world, here = (int(os.environ.get(name) or 0) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if not 0 < here < world or world % here:
        return []
    return sorted({(rank + here) % world, (rank - here) % world})


class _Neighbour:
    """One connection, and what its other end has said."""

    def __init__(self, link: HostLink) -> None:
        self.link, self.frames = link, FrameReader(_LIMITS, BOARD_WORDS)
        self.watches = self.left = False


class HostWatch:
    """This rank's watch over its `neighbours`. Whoever drives it calls `answer` whenever `fileno()` is readable, and
    its `reception` likewise.

    `ended` is called once for every rank of the ring that ends without a good-bye, on the thread that learns it.
    `store` is torch's. Raises UnsupportedError where this host cannot be listened at, and as a JobStore does.
    """

    def __init__(self, store: Any, rank: int, neighbours: Sequence[int], settings: Settings, ended: Ended) -> None:
        self._rank, self._neighbours, self._ended = rank, neighbours, ended
        self._lost_after_s = settings.lost_after_s
        self._store = JobStore(store, max(STORE_LEAST_S, settings.timeout_s), rank)
        self._secret = job_secret(self._store, settings.secret_file)
        self._lock = threading.Lock()
        self._connected: dict[int, _Neighbour] = {}  # by descriptor
        self._closed = False
        self.dead: dict[int, tuple[str, int]] = {}  # why, and whom to blame
        try:
            self.reception = Reception(own_address(store, settings.address), self._secret, rank, self._welcome)
        except OSError as error:
            raise UnsupportedError(f"rank {rank} cannot be watched from other hosts: {error}") from error
        self._epoll = select.epoll()
        close_after_fork(self)
        self._store.set(_key(rank), json.dumps([self.reception.address, self.reception.port]))
        threading.Thread(target=self._dial, name="odc-watch", daemon=True).start()

    def fileno(self) -> int:
        return self._epoll.fileno()

    def watched(self) -> set[int]:
        """The neighbours whose death would be noticed now."""
        return {neighbour.link.member for neighbour in list(self._connected.values()) if neighbour.watches}

    def wait_for_network(self, lost_after_s: float) -> None:
        """Take an interruption of the network for a death only after so long, from now on."""
        with self._lock:
            self._lost_after_s = lost_after_s
            for neighbour in self._connected.values():
                with contextlib.suppress(OSError):  # it has ended, which whoever reads will notice
                    neighbour.link.wait_for_network(lost_after_s)

    # connections -------------------------------------------------------------------------------------------------

    def _dial(self) -> None:
        """Connect to the neighbours that listen already; the others will connect to this rank."""
        for rank in self._neighbours:
            with contextlib.suppress(OdcError, TimeoutError):  # the latter where it is stopped
                found = self._store.find(_key(rank))
                if found is not None and not self._closed:
                    address, port = json.loads(found)
                    where, limit = (address, port), self._lost_after_s
                    self._adopt(connect(where, self._secret, self._rank, rank, PURPOSE, lost_after_s=limit), rank)

    def _welcome(self, purpose: str, rank: int, connection: socket.socket) -> None:
        if purpose == PURPOSE and rank in self._neighbours:
            self._adopt(connection, rank)
        else:
            connection.close()

    def _adopt(self, connection: socket.socket, rank: int) -> None:
        link = HostLink(rank, connection, self._lost_after_s)
        with self._lock:
            if self._closed:
                link.close()
                return
            self._connected[link.fileno()] = _Neighbour(link)
            self._epoll.register(link.fileno(), select.EPOLLIN)
            _send(link, Frame(FrameKind.WORD, Word.LEFT, 0))
            known = list(self.dead.items())
        for dead, (reason, culprit) in known:
            _send(link, _frame(dead, reason, culprit))

    # what they say -----------------------------------------------------------------------------------------------

    def answer(self) -> None:
        """Take what has come from the neighbours. Never raises for one that ends."""
        for fd, _ in [] if self._closed else self._epoll.poll(0):
            neighbour = self._connected[fd]
            try:
                data = neighbour.link.receive()
                if data == b"":
                    raise ConnectionResetError("end of the stream")
                for frame in neighbour.frames.feed(data or b""):
                    self._take(neighbour, frame)
            except (OSError, MalformedFrameError) as error:
                self._drop(fd, error)

    def _take(self, neighbour: _Neighbour, frame: Frame) -> None:
        if frame.kind is FrameKind.REASON:
            self.tell(frame.index, frame.body.decode("utf-8", "replace"), frame.value)
        elif frame.index == Word.LEFT:
            neighbour.watches, neighbour.left = True, bool(frame.value)

    def _drop(self, fd: int, error: Exception) -> None:
        with self._lock:
            neighbour = self._connected.pop(fd)
            self._epoll.unregister(fd)
            neighbour.link.close()
        if neighbour.left or not neighbour.watches:
            return
        rank = named = neighbour.link.member
        if isinstance(error, ConnectionResetError | BrokenPipeError):
            reason = f"rank {rank} died: its connection to rank {self._rank}, which watches it, has ended"
        elif isinstance(error, MalformedFrameError):
            reason = f"rank {rank} speaks nonsense: its connection to rank {self._rank} is broken ({error})"
        else:
            named, other = self._cut_off(rank)
            reason = f"rank {named} cannot be reached any more from rank {other}, its neighbour ({error})"
        self.tell(rank, reason, named)
        # The daemon, on whose thread this is, must not wait for the store.
        arguments = (self._store.within(STORE_ENDING_S), reason, named)
        threading.Thread(target=announce_failure, args=arguments, name="odc-watch", daemon=True).start()

    def _cut_off(self, rank: int) -> tuple[int, int]:
        """Of this rank and the neighbour `rank`, between which the network has been cut: the one to name, the other."""
        with self._lock:
            silent = {one.link.member for one in self._connected.values() if one.link.silent()} | {rank}
        known = {self._rank, *self._neighbours}
        named, _ = side_to_blame(known - silent, silent, min(known))
        return (rank, self._rank) if rank in named else (self._rank, rank)

    def tell(self, rank: int, reason: str, culprit: int) -> None:
        """Note that `rank` has ended, and pass it on around the ring. On any thread; waits for nobody."""
        with self._lock:
            if self._closed or rank in self.dead:
                return
            self.dead[rank] = reason, culprit
            links = [neighbour.link for neighbour in self._connected.values()]
        for link in links:
            _send(link, _frame(rank, reason, culprit))
        self._ended(rank, reason, culprit)

    # ending ------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Say good-bye to the neighbours and hang up; idempotent."""
        with self._lock:
            self._closed = True
            for neighbour in self._connected.values():
                _send(neighbour.link, Frame(FrameKind.WORD, Word.LEFT, 1))
                neighbour.link.hang_up()
        self.close()

    def close(self) -> None:
        """Close everything, and nothing else: a forked child runs this too."""
        self._closed = True
        self.reception.close()
        for neighbour in self._connected.values():
            neighbour.link.close()
        self._epoll.close()


def _send(link: HostLink, frame: Frame) -> None:
    with contextlib.suppress(OSError):  # its end is noticed by who reads
        link.send(frame)


def _frame(rank: int, reason: str, culprit: int) -> Frame:
    return Frame(FrameKind.REASON, rank, culprit, reason.encode()[:REASON_BYTES])


def _key(rank: int) -> str:
    return f"odc/watch/{rank}"
