"""How one root meets its members on other hosts, and how it parts from them.

A rank visits its partners on hosts before its own, on a thread that ends when all are linked, and is visited by those
on hosts after it. What it exposes to reads stays until no member of another host needs it.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from odc.errors import OdcError, PeerLostError
from odc.runtime.connect import Rendezvous
from odc.runtime.layout import HeapLayout
from odc.runtime.links import HostLink, Links
from odc.runtime.network import HostNetwork
from odc.runtime.words import Word


class HostMeeting:
    """The members of one root on other hosts, from this rank's side.

    `abort(reason, culprit)` ends the job; `attend(link, read)` has the daemon call `read` when the link is readable.
    """

    def __init__(
        self,
        identity: str,
        layout: HeapLayout,
        network: HostNetwork,
        abort: Callable[[str, int], None],
        attend: Callable[[HostLink, Callable[[], bool]], None],
    ) -> None:
        self._identity, self._layout, self._grid = identity, layout, layout.grid
        self._network, self._abort, self._attend = network, abort, attend
        self.links = Links(layout, abort)
        self._purpose = f"link {identity}"
        self._closed = False
        network.engine.expose(identity, layout.heap.whole(layout.grid.me))
        network.expect(self._purpose, self._visited)

    def visit(self, rendezvous: Rendezvous) -> None:
        """Have the links made. Waits for nobody: a thread does, and ends the job if a partner does not come up."""
        partners = [member for member in self._grid.partners if self._grid.host(member) < self._grid.here]
        if partners:
            arguments = (rendezvous, partners)
            threading.Thread(target=self._visit, args=arguments, name="odc-link", daemon=True).start()

    def _visit(self, rendezvous: Rendezvous, partners: list[int]) -> None:
        try:
            for partner in partners:
                rendezvous.agreed(partner)
                try:
                    connection = self._network.dial(self._grid.ranks[partner], self._purpose, rendezvous.check)
                except PeerLostError as error:
                    self.links.missed(partner, str(error))
                else:
                    self._link(partner, connection)
        except OdcError as error:
            if not self._closed:
                self._abort(str(error), self._grid.rank if error.culprit is None else error.culprit)

    def _visited(self, connection: socket.socket, rank: int) -> None:
        """On the daemon's thread."""
        after = [
            self._grid.ranks[member] for member in self._grid.partners if self._grid.host(member) > self._grid.here
        ]
        if rank not in after:
            connection.close()
        else:
            self._link(self._grid.ranks.index(rank), connection)

    def _link(self, partner: int, connection: socket.socket) -> None:
        link = self.links.add(partner, connection)
        if link is not None:
            self._attend(link, self.links.reader(link))

    def needed(self) -> bool:
        """Whether a member on another host may still read this rank's memory. Waits for nobody."""
        board, grid = self._layout.pushed_board, self._grid
        for member in grid.remote:
            peer = self._layout.remote(member)
            if not peer.attached or peer.board.load(Word.LEFT) or peer.board.load(Word.ABORT):
                continue
            if peer.board.load(Word.DONE) < board.load(Word.PUBLISHED):
                return True
            sums = member in (grid.nodes.partners if grid.shards_span_hosts else grid.replica_group)
            if sums and peer.board.load(Word.READ) < board.load(Word.COMPLETE):
                return True
        return False

    def close(self) -> None:
        """Hang up, expose nothing any more; on the daemon's thread, or when there is none."""
        self._closed = True
        self._network.expect_no_more(self._purpose)
        self._network.engine.withdraw(self._identity)
        self.links.close()
