"""Members of two hosts in one process, whose links are TCP connections of this host that the test reads by hand."""

from __future__ import annotations

import functools
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from odc.hosts.links import Links
from odc.net.liveness import Loss
from odc.protocol import Word
from odc.runtime import Endpoint
from odc.runtime.service import Service
from odc.settings import Settings
from support.members import F32, HeapGroup, Layout

HOSTS = (0, 0, 1, 1)  # members 0 and 2 are partners, and 1 and 3
LAYOUT: Layout = [[("w", 8, F32), ("b", 2, F32)], [("v", 4, F32)]]
_PATIENCE_S = 60.0


def connection() -> tuple[socket.socket, socket.socket]:
    """Both ends of a new TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def two_hosts_unlinked(**options: Any) -> HeapGroup:
    """Four members on `HOSTS`, attached to those of their host; `options` are of `Settings`."""
    group = HeapGroup(LAYOUT, 4, settings=Settings(timeout_s=60.0, **options), hosts=HOSTS)
    group.attach_local()
    return group


class Linked:
    """Links between the `members` of a group on `HOSTS`, which report losses to the members' services at once."""

    def __init__(self, group: HeapGroup, members: Sequence[int] = (0, 2)) -> None:
        self.group = group
        self.readers, self.filenos = dict[int, Callable[[], bool]](), dict[int, int]()
        self.links = {me: Links(group.layouts[me], functools.partial(self._report, me)) for me in members}
        self.services = {me: Service("group", group.layouts[me], links=links) for me, links in self.links.items()}
        for me, links in self.links.items():
            group.members[me] = Endpoint(group.layouts[me], group.notify, links=links)

    def _report(self, me: int, loss: Loss) -> None:
        self.services[me].lost(loss)

    @property
    def aborts(self) -> dict[int, list[tuple[str, int]]]:
        """By member, the reason and the culprit on its board, if it was aborted."""
        found: dict[int, list[tuple[str, int]]] = {me: [] for me in self.links}
        for me in self.links:
            mine = self.group.layouts[me].mine
            if aborted := mine.board.load(Word.ABORT):
                found[me].append((mine.reason, aborted - 1))
        return found

    def add(self, me: int, partner: int, end: socket.socket) -> None:
        """Link `me` to its partner by one end of a connection."""
        link = self.links[me].add(partner, end)
        assert link is not None
        self.readers[me], self.filenos[me] = self.links[me].reader(link), link.fileno()

    def join(self) -> Linked:
        """Link all partners."""
        for me in (me for me in self.links if me < 2):
            one, other = connection()
            self.add(me, me + 2, one)
            self.add(me + 2, me, other)
        return self

    def receive(self, by: Sequence[int], until: Callable[[], object]) -> None:
        """Read the links of the members `by` until something holds; a link that has ended is not read again."""
        end = time.monotonic() + _PATIENCE_S
        while not until():
            assert time.monotonic() < end
            reading = {self.filenos[me]: me for me in by if me in self.readers}
            for fileno in select.select(list(reading), [], [], 0.05)[0]:
                if not self.readers[reading[fileno]]():
                    del self.readers[reading[fileno]]

    def seen(self, by: int, of: int, word: int) -> int:
        """A word of member `of` as member `by` sees it."""
        return self.group.layouts[by].peer(of).board.load(word)

    def close(self) -> None:
        for links in self.links.values():
            links.close()
        self.group.close()
