"""Members of two hosts in one process, whose links are TCP connections of this host that the test reads by hand."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Sequence

from odc.hosts.links import Links
from odc.runtime import Endpoint
from support.members import HeapGroup

HOSTS = (0, 0, 1, 1)  # members 0 and 2 are partners, and 1 and 3
_PATIENCE_S = 60.0


def connection() -> tuple[socket.socket, socket.socket]:
    """Both ends of a new TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


class Linked:
    """Links between the `members` of a group on `HOSTS`. What they abort is in `aborts`, and reaches their group."""

    def __init__(self, group: HeapGroup, members: Sequence[int] = (0, 2)) -> None:
        self.group = group
        self.aborts: dict[int, list[tuple[str, int]]] = {me: [] for me in members}
        self.readers, self.filenos = dict[int, Callable[[], bool]](), dict[int, int]()
        self.links = {me: Links(group.layouts[me], self._abort(me)) for me in members}
        for me, links in self.links.items():
            group.members[me] = Endpoint(group.layouts[me], group.notify, links=links)

    def _abort(self, me: int) -> Callable[[str, int], None]:
        def abort(reason: str, culprit: int) -> None:
            self.aborts[me].append((reason, culprit))
            self.group.members[me].protocol.abort(reason, culprit)

        return abort

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
