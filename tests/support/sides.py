"""Two ranks' roots in one process, up to the point where they are announced."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from support.members import F32, Layout, units_of

from odc.memory import ShmHeap
from odc.runtime import Daemon, Geometry, Rendezvous, Service, Space, summary
from odc.settings import Settings

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
        self.geometry, self.units = Geometry(RANKS, 2, me), units_of(layout, settings, frozen)
        self.meet = Rendezvous(store, identity, self.geometry, settings.timeout_s, aborted)
        self.heap = ShmHeap(identity, RANKS, me, self.meet.connect, settings.timeout_s)
        self.space = Space(self.heap, self.geometry, self.units, settings, "test")
        self.service, self.daemon = Service(identity, self.space), Daemon(RANKS[me])
        self.daemon.serve(self.service)

    def announce(self, calls: Collection[int] = (), **changed: str) -> Side:
        said = {"door": self.daemon.door_name, "token": self.service.token, "digest": self.heap.digest} | changed
        lines = [unit.lines() for unit in self.units]
        self.meet.announce(said["door"], said["token"], said["digest"], summary(self.units), "", lines, sorted(calls))
        return self

    def close(self) -> None:
        self.daemon.close()
        self.meet.close()
        self.heap.close()
