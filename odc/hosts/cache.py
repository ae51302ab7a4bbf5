"""The node cache: a shard enters a node once an epoch, and every rank of the node copies it from there.

    claim (under its lock) | read from the owner's heap | CACHED        others: wait: CACHED | copy

A node is a host, or a part of one (`RankGrid.nodes`). Claims and CACHED are epochs, so nothing is reset. docs/hosts.md
states what it saves.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence

from odc.deadlines import WORD_SLEEP_S
from odc.errors import PeerLostError, culprit_of
from odc.hosts.changes import ShardReads
from odc.memory import Words
from odc.protocol.heap_reader import HeapReader
from odc.protocol.peers.remote import NodeShare
from odc.protocol.protocol import MemberProtocol
from odc.protocol.units import UnitSpec
from odc.protocol.words import Word
from odc.worker import Job, Worker

_EPOCH, _CLAIMER = 0, 1  # words of a claim


class NodeCache:
    """Shards of members of other nodes, read once a node and epoch. Any thread may call `fill`.

    The cache has room for every unit. So over hosts a thread reads ahead in the order of the last epoch, from this
    rank's first use of a unit on: the network is not idle while ranks compute. It does not wait, and claims what it
    reads.

    Attributes:
        reads: those from the owners.
    """

    def __init__(self, protocol: MemberProtocol, heaps: HeapReader, worker: Worker) -> None:
        self._protocol, self._layout, self._worker = protocol, protocol.layout, worker
        self.reads = ShardReads(protocol, heaps)
        grid = protocol.grid.nodes
        owners = [member for member in grid.shard_group if grid.is_remote(member)]
        # This rank's own partners first, so that the ranks of a node read from different owners; of these that on the
        # next node, so that nodes read from different nodes.
        apart = {member: (grid.index(member) - grid.index(grid.me)) % len(grid.local) for member in owners}
        self._owners = sorted(owners, key=lambda member: (apart[member], grid.steps_to(member)))
        self._epoch, self._used = 0, list[int]()  # units used in it, which are read ahead in the next
        self._filled: dict[int, int] = {}  # by unit: the newest epoch whose shards this rank has seen in the cache
        self._looking = threading.Lock()
        self._settled, self._closed = 0, False  # the newest epoch of which nothing more is read ahead
        self._newest: Job[None] | None = None  # of this cache, on the worker

    def fill(self, unit: UnitSpec, lane: str = "main") -> None:
        """Return when the shards of `unit` of all remote owners lie in the cache. They have been published."""
        epoch = self._protocol.epoch
        if self._filled.get(unit.index) == epoch:
            return  # with hundreds of owners to ask a second check takes milliseconds
        self._look_ahead(unit.index, epoch)
        # What is CACHED has been claimed.
        missing = [peer for peer in map(self._layout.share, self._owners) if peer.cached(unit).load(0) < epoch]
        try:
            # In a lane of its own: peers wait until it has settled, and that of a fetch follows this rank's compute.
            with self._layout.heap.lanes.lane("node"):
                self.reads.bring(((peer, unit) for peer in missing if self._claim(peer, unit, epoch)), epoch)
        except BaseException as error:  # KeyboardInterrupt, too
            self._fail(error)
            raise
        for peer in missing:
            cached = peer.cached(unit)
            if cached.load(0) < epoch:
                self._await(peer, unit, epoch, cached, lane)
        self._filled[unit.index] = epoch

    def _look_ahead(self, unit: int, epoch: int) -> None:
        if not self._layout.spans_hosts:
            return
        with self._looking:
            if epoch != self._epoch:
                before, self._epoch, self._used = self._used, epoch, []
                if before:
                    self._newest = job = Job(functools.partial(self._read_ahead, before, epoch))
                    try:
                        self._worker.submit(job)
                    except BaseException:  # a signal's handler's, too: `settle` would wait for it
                        job.drop()
                        raise
            if unit not in self._used:
                self._used.append(unit)

    def _read_ahead(self, units: Sequence[int], epoch: int) -> None:
        """On the worker's thread."""
        try:
            with self._layout.heap.lanes.lane("ahead"):
                self.reads.bring(self._ahead(units, epoch), epoch)
        except Exception as error:
            self._fail(error)

    def _ahead(self, units: Sequence[int], epoch: int) -> Iterator[tuple[NodeShare, UnitSpec]]:
        """What this rank has to read, as far as it is published when it is its turn."""
        for unit in (self._layout.units[index] for index in units):
            for owner in self._owners:
                if self._settled >= epoch or self._closed:
                    return
                peer = self._layout.share(owner)
                if self._protocol.has_published(owner, epoch) and self._claim(peer, unit, epoch):
                    yield peer, unit

    def _fail(self, error: BaseException) -> None:
        """End the job: the ranks of this node, and this one too, may wait for what this rank has claimed."""
        if not self._closed:
            reason = f"{type(error).__name__} in epoch {self._protocol.epoch}: {error}"
            self._protocol.abort(reason, culprit_of(error, self._layout.grid.rank))

    def settle(self) -> None:
        """Read no further ahead; return when nothing is being read. Before DONE."""
        self._settled = self._protocol.epoch
        if self._newest is not None:
            self._protocol.await_reads(self._owners[0], "shards ahead", self._newest.over)

    def close(self) -> None:
        """End the worker once it has read what it reads. Does not wait."""
        self._closed = True
        self._worker.close()

    def _claim(self, peer: NodeShare, unit: UnitSpec, epoch: int) -> bool:
        """Whether this rank has to read the shard: it is the first of its node to ask for it in this epoch."""
        claims = peer.claims(unit)
        if claims.load(_EPOCH) >= epoch:
            return False
        try:
            with peer.claim_mutex(unit).held(self._layout.settings.timeout_s):
                if claims.load(_EPOCH) >= epoch:
                    return False
                claims.store(_CLAIMER, self._layout.grid.me)
                claims.store(_EPOCH, epoch)
                return True
        except PeerLostError:
            self._protocol.waiter.await_reason(f"claiming the shard of unit {unit.name!r} of rank {peer.rank}")
            raise

    def _await(self, peer: NodeShare, unit: UnitSpec, epoch: int, cached: Words, lane: str) -> None:
        claimer = peer.claims(unit).load(_CLAIMER)
        rank = self._layout.grid.ranks[claimer]
        what = f"rank {rank} to read unit {unit.name!r} of epoch {epoch} from rank {peer.rank}, for this node"
        board = self._layout.local(claimer).board

        def settled() -> bool:
            return cached.load(0) >= epoch or board.load(Word.LEFT) != 0

        pause = functools.partial(cached.wait_at_least, 0, epoch, WORD_SLEEP_S) if self._layout.spans_hosts else None
        self._protocol.waiter.until(settled, claimer, what, lane=lane, pause=pause, word="CACHED")
        if cached.load(0) < epoch:
            # It has evaluated, and left while its thread read ahead. No epoch follows one that a rank has left.
            with self._layout.heap.lanes.lane("node"):
                self.reads.bring_whole(peer, unit, epoch)
