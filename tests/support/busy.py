"""A job of two members in this process, each with a daemon, on devices whose lanes are threads (`support.threaded`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from odc.net.requests import ask
from odc.runtime import Daemon
from odc.settings import Settings
from support.members import HeapGroup
from support.sides import ONE_UNIT
from support.threaded import DEADLINE_S, ThreadedLanes, threaded_heaps
from support.waiting import until

OWNER, FAST = 0, 1
PUSHES = 84  # of 28 units in three microbatches


class _ServedGroup(HeapGroup):
    """A group whose pushers notify the owner's daemon."""

    def __init__(self, servers: list[Daemon], *args: Any, **options: Any) -> None:
        self._servers = servers
        super().__init__(*args, **options)

    def notify(self, member: int) -> None:
        self._servers[member].notify()


@dataclass
class Job:
    """`OWNER` computes for long, or its device is busy; `FAST` pushes to it."""

    group: HeapGroup
    lanes: list[ThreadedLanes]
    servers: list[Daemon]

    def sum(self) -> set[float]:
        """What the owner's accumulator holds."""
        return set(self.group.layouts[OWNER].mine.accumulator(self.group.units[0]).tolist())

    def added(self) -> int:
        """Blocks of the fast member whose slots were given back."""
        return self.group.layouts[OWNER].mine.accumulated.load(FAST)

    def push(self) -> None:
        with self.lanes[FAST].lane("push"):
            self.group.push(FAST, 1.0)

    def push_one(self) -> None:
        """Return when the owner's daemon has asked its device to add the block, and for a mark."""
        asked = self.lanes[OWNER].asked
        before = asked["server"]
        self.push()
        until(lambda: asked["server"] >= before + 2)

    def status(self) -> dict[str, Any]:
        """The answer of the owner's daemon."""
        root: dict[str, Any] = ask(self.servers[OWNER].address, {"op": "status"}, DEADLINE_S).reply["roots"][0]
        return root

    def dismiss(self, then: Callable[[], None]) -> Callable[[], None]:
        """As `Daemon.dismiss` of the owner."""
        return self.servers[OWNER].dismiss(self.group.services[OWNER], then)


@contextmanager
def busy_job(accumulate: str = "server") -> Iterator[Job]:
    """A job whose members have published."""
    settings = Settings(timeout_s=DEADLINE_S, accumulate=accumulate)
    servers: list[Daemon] = []
    with threaded_heaps() as lanes, _ServedGroup(servers, ONE_UNIT, 2, settings=settings) as group:
        servers += [Daemon(rank) for rank in group.ranks]
        group.attach()
        group.publish_all()
        for server, service in zip(servers, group.services, strict=True):
            server.serve(service)
        try:
            yield Job(group, lanes, servers)
            for server, service in zip(servers, group.services, strict=True):
                server.dismiss(service)()
        finally:
            for server in servers:
                server.close()
