"""A root over several hosts: on which its members run, how it links to those on others, and what it shows them.

A rank dials its partners on lower-numbered hosts, on a thread that ends when all are linked, and accepts from those
on hosts after it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import socket
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from odc.deadlines import ENDED_LONGEST_POLL_S, STORE_POLL_S, Backoff
from odc.errors import OdcError, PeerLostError, culprit_of
from odc.hosts.links import Links
from odc.net.announced import await_host, find_hosts, host_identity, refuse_failure
from odc.net.engines import Engine
from odc.net.handshake import export_purpose, link_purpose
from odc.net.host_link import HostLink
from odc.net.network import HostNetwork
from odc.net.store import JobStore
from odc.protocol.grid import RankGrid
from odc.protocol.layout import HeapLayout
from odc.protocol.protocol import abort
from odc.protocol.words import Word
from odc.runtime.connect import Rendezvous
from odc.worker import in_background

#: The words of the board that a reader outside the job needs, and receives.
READER_WORDS = (Word.PUBLISHED, Word.PUBLISHING, Word.PROGRESS, Word.ABORT, Word.LEFT)
#: These words and the digest of the heap's layout. Why the job ended follows as text.
BOARD = struct.Struct(f"!{len(READER_WORDS)}q64s")


def locate(store: JobStore, grid: RankGrid) -> RankGrid:
    """`grid` with the hosts of its members; the same object where all are on this one.

    Waits until every rank has called `fully_shard`, or made an exchange. Raises as a JobStore does, WaitTimeoutError if
    a rank does not come up within the store's timeout, and PeerLostError if one has ended with an error instead.
    """
    here, known = host_identity(), store.hosts
    while missing := [rank for rank in grid.ranks if rank != grid.rank and rank not in known]:
        if not find_hosts(store, missing):
            _await_host(store, missing[0], grid.rank)
    found = [here if rank == grid.rank else known[rank] for rank in grid.ranks]
    if len(set(found)) == 1:
        return grid
    return dataclasses.replace(grid, hosts=parts_of(found))


def parts_of(hosts: Sequence[str]) -> tuple[int, ...]:
    """Of each member the number of its host, or where hosts have unequally many members, of the part of its host: the
    largest parts of equal size into which all hosts divide (4 where one has 8 members and one 4). Members of another
    part are reached as those of another host.
    """
    size, before, numbers = math.gcd(*Counter(hosts).values()), Counter[str](), dict[tuple[str, int], int]()
    found = []
    for host in hosts:
        found.append(numbers.setdefault((host, before[host] // size), len(numbers)))
        before[host] += 1
    return tuple(found)


def _await_host(store: JobStore, rank: int, me: int) -> None:
    doing = f"rank {me}, waiting for rank {rank} to come up"
    late = (
        f"{doing}: it has not called fully_shard in {store.timeout_s:g} s, nor made an exchange; every rank of the "
        "mesh must shard the same modules"
    )
    await_host(store, rank, late, lambda: refuse_failure(store, doing))


class HostConnections:
    """The members of one root on other hosts, from this rank's side.

    `attend(link)` lets the daemon read the link.
    """

    def __init__(
        self,
        identity: str,
        layout: HeapLayout,
        network: HostNetwork,
        links: Links,
        attend: Callable[[HostLink], None],
    ) -> None:
        self._layout, self._grid = layout, layout.grid
        self._network, self.links, self._attend = network, links, attend
        self._purpose = link_purpose(identity)
        self._closed = False
        network.expect(self._purpose, self._accepted)

    def connect(self, rendezvous: Rendezvous) -> None:
        """Start the thread that makes the links, or waits for them. It ends the job if a partner does not come up."""
        if self._grid.partners:
            in_background("odc-link", lambda: self._dial(rendezvous))

    def _dial(self, rendezvous: Rendezvous) -> None:
        try:
            awaited = set(self._grid.partners)
            for partner in (one for one in self._grid.partners if self._grid.host(one) < self._grid.here):
                rendezvous.agreed(partner)
                try:
                    connection = self._network.dial(self._grid.ranks[partner], self._purpose, rendezvous.check)
                except PeerLostError as error:
                    self.links.missed(partner, str(error))
                    awaited.remove(partner)
                else:
                    self._link(partner, connection)
            backoff = Backoff(STORE_POLL_S, ENDED_LONGEST_POLL_S)
            while not self._closed and not all(map(self.links.up, awaited)):
                rendezvous.refuse_failed("waiting for links")  # which do not come from ranks that have ended by then
                backoff.sleep()
        except Exception as error:
            if not self._closed:
                abort(self._layout, str(error), culprit_of(error, self._grid.rank))
            if not isinstance(error, OdcError):
                raise  # its traceback is written

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
            self._attend(link)

    def needed_by(self, unread: Callable[[], list[int]] = list) -> list[int]:
        """Members that may still read this rank's memory from another host, need its links, or have not acknowledged
        all that it has sent. Does not wait. `unread()` are members that have to read what this rank shows in an arena.
        """
        if not self._layout.units:
            return unread() + self._needed_by_arena() or self.links.unacknowledged()
        board, grid, found = self._layout.mine.board, self._grid, self.links.unacknowledged()
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
        """Other hosts must have heard that it shuts down, and ranks of this host look into the
        mirrors that its daemon writes until they shut down too.
        """
        there = [one for one in self._grid.partners if not self._layout.remote(one).board.load(Word.LEFT)]
        here = [self._layout.local(member) for member in self._grid.local if member != self._grid.me]
        unacknowledged = [partner for partner in there if not self.links.up(partner)]
        return unacknowledged + [one.member for one in here if one.attached and not one.board.load(Word.LEFT)]

    def close(self) -> None:
        """Hang up; on the daemon's thread, or when there is none."""
        self._closed = True
        self._network.expect_no_more(self._purpose)
        self.links.close()


def board_name(identity: str) -> str:
    """The name under which a member serves its board to readers."""
    return f"{identity}/board"


class ExposedHeap:
    """This rank's heap of one root, exposed under the root's identity until `close`.

    `answers` are functions by the name under which they answer members of other hosts. Weights are also exposed to
    readers outside the job (`HeapLayout.exports`), which are admitted by a secret of the root's own. They may read the
    bytes of `HeapLayout.readable` and receive `READER_WORDS`; every other byte of the heap is refused.
    """

    def __init__(
        self, identity: str, layout: HeapLayout, network: HostNetwork, answers: Mapping[str, Callable[[], bytes]]
    ) -> None:
        self._identity, self._network, self._names = identity, network, [*answers]
        self._readable = {identity + part: place for part, place in layout.readable.items()}
        self._readable[board_name(identity)] = range(0)
        # Where no member is on another host readers come by TCP, and no memory need be registered with a card.
        expose = network.engine.expose if layout.grid.remote else functools.partial(Engine.expose, network.engine)
        for part, memory in layout.heap.parts().items():
            self._names.append(identity + part)
            expose(identity + part, memory)
        for name, function in answers.items():
            network.engine.answer(name, function)
        if layout.units and layout.exports:
            self._names.append(board_name(identity))
            network.engine.answer(board_name(identity), functools.partial(_board, layout))
            network.expect(export_purpose(identity), self._accepted)

    def _accepted(self, connection: socket.socket, rank: int) -> None:
        """By a reader; on the daemon's thread."""
        self._network.engine.adopt(connection, rank, only=self._readable)

    def close(self) -> None:
        """Expose nothing any more; on the daemon's thread, or when there is none."""
        self._network.expect_no_more(export_purpose(self._identity))
        for name in self._names:
            self._network.engine.withdraw(name)


def _board(layout: HeapLayout) -> bytes:
    """On a thread of the engine."""
    words = {word: layout.mine.board.load(word) for word in READER_WORDS}
    reason = layout.mine.reason if words[Word.ABORT] or words[Word.LEFT] else ""
    return BOARD.pack(*words.values(), layout.heap.digest.encode()) + reason.encode()
