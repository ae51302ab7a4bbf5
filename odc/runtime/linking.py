"""How one root meets its members on other hosts, and how it parts from them.

A rank dials its partners on lower-numbered hosts, on a thread that ends when all are linked, and accepts from those
on hosts after it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from odc.errors import OdcError, PeerLostError, culprit_of
from odc.hosts.links import Links
from odc.net.host_link import HostLink
from odc.net.liveness import Loss
from odc.net.network import HostNetwork
from odc.protocol.layout import HeapLayout
from odc.protocol.protocol import abort
from odc.protocol.words import Word
from odc.runtime.connect import Rendezvous
from odc.worker import in_background


class HostConnections:
    """The members of one root on other hosts, from this rank's side.

    `report` is that of the table of lost ranks; `attend(link, read)` lets the daemon call `read` when the link is
    readable.
    """

    def __init__(
        self,
        identity: str,
        layout: HeapLayout,
        network: HostNetwork,
        report: Callable[[Loss], None],
        attend: Callable[[HostLink, Callable[[], bool]], None],
    ) -> None:
        self._layout, self._grid = layout, layout.grid
        self._network, self._attend = network, attend
        self.links = Links(layout, report, network.lost_after_s)
        self.unread: Callable[[], list[int]] = list  # members that have still to read what this rank shows in an arena
        self._purpose = f"link {identity}"
        self._closed = False
        network.expect(self._purpose, self._accepted)

    def connect(self, rendezvous: Rendezvous) -> None:
        """Start the thread that makes the links. It ends the job if a partner does not come up."""
        partners = [member for member in self._grid.partners if self._grid.host(member) < self._grid.here]
        if partners:
            in_background("odc-link", lambda: self._dial(rendezvous, partners))

    def _dial(self, rendezvous: Rendezvous, partners: list[int]) -> None:
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
                abort(self._layout, str(error), culprit_of(error, self._grid.rank))

    def _accepted(self, connection: socket.socket, rank: int) -> None:
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

    def needed_by(self) -> list[int]:
        """Members that may still read this rank's memory from another host, need its links, or have not heard all that
        it has sent. Does not wait.
        """
        if not self._layout.units:
            return self._needed_by_arena() or self.links.unacknowledged()
        board, grid, found = self._layout.pushed_board, self._grid, self.links.unacknowledged()
        for member in grid.remote:
            peer = self._layout.remote(member)
            if not peer.attached or peer.board.load(Word.LEFT) or peer.board.load(Word.ABORT):
                continue
            sums = member in (grid.nodes.partners if grid.shards_span_hosts else grid.replica_group)
            if peer.board.load(Word.DONE) < board.load(Word.PUBLISHED) or (
                sums and peer.board.load(Word.READ) < board.load(Word.COMPLETE)
            ):
                found.append(member)
        return found

    def _needed_by_arena(self) -> list[int]:
        """Other hosts must have read its entries and heard that it shuts down, and ranks of this host look into the
        mirrors that its daemon writes until they shut down too.
        """
        there = [one for one in self._grid.partners if not self._layout.remote(one).board.load(Word.LEFT)]
        here = [self._layout.local(member) for member in self._grid.local if member != self._grid.me]
        unacknowledged = [partner for partner in there if not self.links.up(partner)]
        return (
            self.unread()
            + unacknowledged
            + [one.member for one in here if one.attached and not one.board.load(Word.LEFT)]
        )

    def close(self) -> None:
        """Hang up; on the daemon's thread, or when there is none."""
        self._closed = True
        self._network.expect_no_more(self._purpose)
        self.links.close()
