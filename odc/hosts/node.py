"""The node cache and the node sums: a shard enters a node once, a node's gradients leave it once an owner.

    cache     claim (under its lock) | read from the owner's heap | CACHED        others: wait: CACHED | copy
    sums      every local rank adds (under the lock) to the sum in its column's heap    wait: all DONE | COMPLETE
              the owner: wait: its partners' COMPLETE | read | add, in the order of the nodes | READ

A node is a host, or a part of one (`RankGrid.nodes`). Claims and CACHED are epochs, so nothing is reset. docs/hosts.md
says what it saves.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from odc.deadlines import WORD_SLEEP_S
from odc.errors import PeerLostError, culprit_of
from odc.memory import Words
from odc.net.engines import Engine
from odc.protocol.grid import RankGrid
from odc.protocol.layout import HeapLayout
from odc.protocol.peers.remote import NodeShare
from odc.protocol.protocol import MemberProtocol
from odc.protocol.units import UnitSpec
from odc.protocol.words import Word
from odc.worker import Job, Worker

_EPOCH, _CLAIMER = 0, 1  # words of a claim
_CLAIM, _CLAIMS = "/claim", "/claims"  # what the home of a queue is asked for, after the root's identity


class RemoteHeaps:
    """Reads from the heaps of members of other nodes: of those on this host, which are mapped, by a copy.

    Those on other hosts expose the heap of a root under its `identity` to the `engine`, None where there is one host.

    Attributes:
        worker: its thread reads ahead, shards and sums of gradients.
    """

    def __init__(self, identity: str, engine: Engine | None, protocol: MemberProtocol) -> None:
        self._identity, self._engine, self._protocol = identity, engine, protocol
        self._landing = threading.Lock()
        self.worker = Worker("odc-ahead")

    def read(self, member: int, region: str, offset: int, into: torch.Tensor, what: str) -> None:
        """Fill `into` with what lies from byte `offset` on in the member's `region`.

        `into` is uint8 [n], in the heap of a rank of this host or in CPU memory of this rank. Returns when it has
        settled. Raises as `Engine.read` does.
        """
        layout, engine = self._protocol.layout, self._engine
        if not layout.grid.is_remote(member):
            into.copy_(layout.heap.tensor(member, region, torch.uint8, offset=offset, numel=into.numel()))
            layout.heap.lanes.settle()
            return
        assert engine is not None
        landing = layout.landing if engine.only_into_own else None
        if landing is None or into.device != layout.heap.device or layout.is_mine(into):
            self._read(engine, member, region, offset, into, what)
            return
        with self._landing:
            for part in into.split(landing.numel()):
                landed = landing[: part.numel()]
                self._read(engine, member, region, offset, landed, what)
                layout.mover.put(part.data_ptr(), landed.data_ptr(), part.numel())
                layout.heap.lanes.settle()
                offset += part.numel()

    def _read(self, engine: Engine, member: int, region: str, offset: int, into: torch.Tensor, what: str) -> None:
        layout, check = self._protocol.layout, self._protocol.waiter.check
        rank, (part, start) = layout.grid.ranks[member], layout.heap.place(region)
        with self._explained(rank, what):
            engine.read(rank, self._identity + part, start + offset, into, what=what, check=check)

    def claim(self, home: int) -> int:
        """Add to CLAIMED in the heap of `home`, exactly once; returns its value before. Raises as `Engine.ask` does."""
        return self._ask(home, _CLAIM, "the next number of the queue")

    def claims(self, home: int) -> int:
        """CLAIMED in the heap of `home`. Raises as `Engine.ask` does."""
        return self._ask(home, _CLAIMS, "how much of the queue is claimed")

    def _ask(self, home: int, name: str, what: str) -> int:
        assert self._engine is not None
        rank = self._protocol.grid.ranks[home]
        with self._explained(rank, what):
            said = self._engine.ask(rank, self._identity + name, what=what, check=self._protocol.waiter.check)
        return int.from_bytes(said, "big")

    @contextlib.contextmanager
    def _explained(self, rank: int, what: str) -> Iterator[None]:
        try:
            yield
        except PeerLostError:
            self._protocol.waiter.await_reason(f"reading {what} of rank {rank}")
            raise


def queue_answers(identity: str, protocol: MemberProtocol) -> dict[str, Callable[[], bytes]]:
    """What the home of a root's queue answers other hosts with, by name; on any thread."""

    def answer(number: Callable[[], int]) -> bytes:
        return number().to_bytes(8, "big")

    counts = {_CLAIM: protocol.claim_at_home, _CLAIMS: protocol.claims_at_home}
    return {identity + name: functools.partial(answer, number) for name, number in counts.items()}


class NodeCache:
    """Shards of members of other nodes, read once a node and epoch. Any thread may call `fill`.

    The cache has room for every unit. So over hosts a thread reads ahead in the order of the last epoch, from this
    rank's first use of a unit on: the network is not idle while ranks compute. It does not wait, and claims what it
    reads.
    """

    def __init__(self, protocol: MemberProtocol, heaps: RemoteHeaps) -> None:
        self._protocol, self._layout, self._heaps = protocol, protocol.layout, heaps
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
            return  # with hundreds of owners to ask a second look takes milliseconds
        peers = [self._layout.share(owner) for owner in self._owners]
        self._look_ahead(unit.index, epoch)
        for peer in peers:
            if self._claim(peer, unit, epoch):
                self._read(peer, unit, epoch)
        for peer in peers:
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
                    self._newest = Job(functools.partial(self._read_ahead, before, epoch))
                    self._heaps.worker.submit(self._newest)
            if unit not in self._used:
                self._used.append(unit)

    def _read_ahead(self, units: Sequence[int], epoch: int) -> None:
        """On the worker's thread."""
        for unit in (self._layout.units[index] for index in units):
            if self._settled >= epoch or self._closed:
                return
            try:
                with self._layout.heap.lanes.lane("ahead"):
                    for owner in self._owners:
                        peer = self._layout.share(owner)
                        if self._protocol.has_published(owner, epoch) and self._claim(peer, unit, epoch):
                            self._read(peer, unit, epoch)
            except Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        """End the job: the ranks of this host, and this one too, may be waiting for what the thread has claimed."""
        if not self._closed:
            reason = f"{type(error).__name__} in epoch {self._epoch}: {error}"
            self._protocol.abort(reason, culprit_of(error, self._layout.grid.rank))

    def settle(self) -> None:
        """Read no further ahead; return when nothing is being read. Before DONE."""
        self._settled = self._protocol.epoch
        if self._newest is not None:
            pause = functools.partial(self._newest.over, WORD_SLEEP_S)
            self._protocol.await_reads(self._owners[0], "shards ahead", self._newest.over, pause)

    def close(self) -> None:
        """End the worker once it has read what it reads. Does not wait."""
        self._closed = True
        self._heaps.worker.close()

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

    def _read(self, peer: NodeShare, unit: UnitSpec, epoch: int) -> None:
        place = peer.published_bytes(unit)[: unit.published_bytes]
        offset = self._layout.buffer_offset(unit, epoch)
        self._heaps.read(peer.member, f"published/{unit.index}", offset, place, f"unit {unit.name!r}")
        cached = peer.cached(unit)
        cached.store(0, epoch)  # release: the shard is there
        cached.wake(0)

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
            # It has evaluated, and left while its thread read ahead. Whatever it may still write is the same bytes, as
            # no epoch follows one that a rank has left.
            self._read(peer, unit, epoch)


def gather_sums(layout: HeapLayout, heaps: RemoteHeaps, used: Sequence[bool]) -> None:
    """Read other hosts' sums of this rank's gradients, of the units that are `used`. They have been completed."""
    grid, nodes = layout.grid, layout.grid.nodes
    for number, member in sorted(enumerate(layout.contributors), key=lambda one: grid.steps_to(one[1])):
        into, region = layout.arrived(number), f"sums/{_row_in(nodes, member)}"
        for first, end in runs(itertools.compress(itertools.count(), used)):
            start, stop = layout.sums_at[first], layout.sums_at[end]
            if stop > start:
                heaps.read(member, region, start, into[start:stop], "its host's sums of gradients")


def runs(units: Iterable[int]) -> list[tuple[int, int]]:
    """(first, end) of each run of units that follow each other: one read each."""
    found: list[tuple[int, int]] = []
    for unit in sorted(units):
        if found and found[-1][1] == unit:
            found[-1] = found[-1][0], unit + 1
        else:
            found.append((unit, unit + 1))
    return found


def node_parts(layout: HeapLayout, unit: UnitSpec) -> list[torch.Tensor]:
    """What adds up to this rank's shard of the gradient of `unit`, where shards span nodes; as `replicas.parts`."""
    nodes = layout.grid.nodes
    return [
        layout.mine.accumulator(unit) if node == nodes.here else _sums_from(layout, nodes.partner(node), unit)
        for node in range(nodes.host_count)
    ]


def _sums_from(layout: HeapLayout, partner: int, unit: UnitSpec) -> torch.Tensor:
    """1-D [unit.numel]: the sum of a partner's node for this rank; of another host's those that have arrived."""
    if not layout.grid.is_remote(partner):
        return layout.sums_of(partner, _row_in(layout.grid.nodes, partner), unit)
    start, dtype = layout.wire_at[unit.index], layout.rounded or unit.accumulator_dtype
    raw = layout.arrived(layout.contributors.index(partner))
    return raw[start : start + unit.numel * dtype.itemsize].view(dtype)


def _row_in(nodes: RankGrid, partner: int) -> int:
    """This rank's node among those for which the heap of `partner` holds sums."""
    return nodes.row(nodes.here, seen_from=nodes.host(partner))
