"""Ranks' roots in one process, each with a daemon, up to the point where they are announced; and waits for daemons."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection
from typing import Any

from odc.memory import ShmHeap
from odc.net.requests import ask
from odc.protocol import HeapLayout, MemberProtocol, RankGrid, Word
from odc.runtime import Daemon, Rendezvous, Service
from odc.runtime.connect import RootEvents
from odc.runtime.shutdown import HeapRelease
from odc.settings import Settings
from support.members import F32, HeapGroup, Layout, units_of

ONE_UNIT: Layout = [[("w", 8, F32)]]
LAYOUT: Layout = [[("w", 8, F32), ("b", 2, F32)], [("v", 4, F32)]]
RANKS = (10, 13)


class Side:
    """One rank's root up to the point where it is announced, with a daemon of its own."""

    def __init__(
        self,
        store: Any,
        me: int,
        layout: Layout = LAYOUT,
        settings: Settings | None = None,
        aborted: Callable[[str], None] = lambda doing: None,
        frozen: Collection[str] = (),
        identity: str = "7.abc",
    ) -> None:
        settings = settings or Settings(timeout_s=60.0)
        self.grid, self.units = RankGrid(RANKS, 2, me), units_of(layout, settings, frozen)
        self.attached: list[tuple[int, int]] = []  # members and their processes
        self.failures: list[tuple[str, int]] = []
        events = RootEvents(aborted, lambda *peer: self.attached.append(peer), self._failed)
        self.meet = Rendezvous(store, identity, self.grid, settings.timeout_s, events)
        self.heap = ShmHeap(identity, RANKS, me, self.meet.connect, settings.timeout_s)
        self.layout = HeapLayout(self.heap, self.grid, self.units, settings, "test")
        self.protocol = MemberProtocol(self.layout)
        self.service, self.daemon = Service(identity, self.layout), Daemon(RANKS[me])
        self.daemon.serve(self.service)

    def _failed(self, reason: str, culprit: int) -> None:
        self.failures.append((reason, culprit))
        self.service.abort(reason, culprit)

    def announce(self, calls: Collection[int] = (), **changed: str) -> Side:
        message = {"address": self.daemon.address, "token": self.service.token, "digest": self.heap.digest} | changed
        self.meet.announce(message["address"], message["token"], message["digest"], self.units, "", sorted(calls))
        return self

    def leave(self, note: str = "") -> Callable[[], None]:
        """Shut down as `Member.shut_down` does; returns what waits for the heap's end."""
        self.protocol.leave(note)
        release = HeapRelease(self.service, self.meet, functools.partial(self.daemon.dismiss, self.service))
        return self.daemon.releases.add(release)

    def close(self) -> None:
        self.daemon.close()
        self.meet.close()
        self.heap.close()


def settle(server: Daemon) -> None:
    """Return when the loop has handled all that had happened before."""
    for _ in range(2):
        ask(server.address, {"op": "status"}, 60.0)


def descriptors() -> set[str]:
    """Open in this process."""
    return set(os.listdir("/proc/self/fd"))


def aborts(group: HeapGroup) -> list[int]:
    """The word of each of three members: 0, or 1 + the culprit's rank."""
    return [group.layouts[member].peer(member).board.load(Word.ABORT) for member in range(3)]
