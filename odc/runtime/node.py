"""The node cache, by which a shard crosses the network once a host; what adds up to a gradient over hosts.

    cache     claim (under its lock) | read from the owner's heap | CACHED        others: wait: CACHED | copy

Claims and CACHED are epochs, so nothing is reset. docs/hosts.md says what it saves.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch

from odc.errors import PeerLostError
from odc.memory import Words
from odc.runtime.engines import Engine
from odc.runtime.layout import HeapLayout
from odc.runtime.peers.remote import RemotePeer
from odc.runtime.protocol import MemberProtocol
from odc.runtime.units import UnitSpec
from odc.runtime.wait import Backoff, Deadline

_EPOCH, _CLAIMER = 0, 1  # words of a claim
NAP_S = 0.1  # between two looks at ABORT while a thread of this rank reads
_LINK_S = 2.0  # that a link may take longer than a read to notice an end


class RemoteHeaps:
    """Reads from the heaps of members on other hosts, of one root, which every member exposes under its `identity`."""

    def __init__(self, identity: str, engine: Engine, protocol: MemberProtocol) -> None:
        self._identity, self._engine, self._protocol = identity, engine, protocol

    def read(self, member: int, region: str, offset: int, into: torch.Tensor, what: str) -> None:
        """Fill `into`, uint8 [n], from byte `offset` of the member's `region`. Raises as `Engine.read` does."""
        layout, check = self._protocol.layout, self._protocol.waiter.check
        rank, start = layout.grid.ranks[member], layout.heap.layout.offset(region) + offset
        try:
            self._engine.read(rank, self._identity, start, into, what=what, check=check)
        except PeerLostError:
            deadline, backoff = Deadline(_LINK_S), Backoff(0.005, 0.05)
            while not deadline.passed():  # the links know more: who died, or which host has vanished
                check(f"reading {what} of rank {rank}")
                backoff.sleep()
            raise


class NodeCache:
    """Shards of members on other hosts, read once a host and epoch. Any thread may call `fill`.

    The cache has room for every unit, so a thread reads ahead in the order of the last epoch, from this rank's first
    use of a unit on: the network is never idle while ranks compute. It waits for nobody, and claims what it reads.
    """

    def __init__(self, protocol: MemberProtocol, heaps: RemoteHeaps) -> None:
        self._protocol, self._layout, self._heaps = protocol, protocol.layout, heaps
        grid = protocol.grid
        owners = [member for member in grid.shard_group if grid.is_remote(member)]
        # This rank's own partners first, so that the ranks of a host read from different owners; of these that on the
        # next host, so that hosts read from different hosts.
        apart = {member: (grid.index(member) - grid.index(grid.me)) % len(grid.local) for member in owners}
        self._owners = sorted(owners, key=lambda member: (apart[member], grid.steps_to(member)))
        self._epoch, self._used, self._ahead = 0, list[int](), deque[int]()  # units: used in it, to be read ahead
        self._changed = threading.Condition()
        self._reading = self._closed = False  # whether the thread is in a read
        self._failed: Exception | None = None
        self._thread: threading.Thread | None = None

    def fill(self, unit: UnitSpec, lane: str = "main") -> None:
        """Return when the shards of `unit` of all remote owners lie in the cache. They have been published."""
        epoch, peers = self._protocol.epoch, [self._layout.remote(owner) for owner in self._owners]
        self._look_ahead(unit.index, epoch)
        for peer in peers:
            if self._claim(peer, unit, epoch):
                self._read(peer, unit, epoch)
        for peer in peers:
            cached = peer.cached(unit)
            if cached.load(0) < epoch:
                self._await(peer, unit, epoch, cached, lane)

    def _look_ahead(self, unit: int, epoch: int) -> None:
        with self._changed:
            if self._failed is not None:
                raise self._failed
            if epoch != self._epoch:
                self._epoch, self._used, self._ahead = epoch, [], deque(self._used)
            if unit not in self._used:
                self._used.append(unit)
            if self._ahead and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="odc-ahead", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._reading = False
                self._changed.notify_all()
                while not self._ahead and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                unit, epoch, self._reading = self._layout.units[self._ahead.popleft()], self._epoch, True
            try:
                for owner in self._owners:
                    peer = self._layout.remote(owner)
                    if self._protocol.has_published(owner, epoch) and self._claim(peer, unit, epoch):
                        self._read(peer, unit, epoch)
            except Exception as error:
                self._failed = error  # ranks of this host wait for what was claimed: the next fill ends the job

    def settle(self) -> None:
        """Read no further ahead; return when nothing is being read. Before DONE."""
        with self._changed:
            self._ahead.clear()
        nap = functools.partial(nap_until, self._changed, self._idle)
        self._protocol.await_reads(self._owners[0], "shards ahead", self._idle, nap)

    def _idle(self) -> bool:
        return not self._reading

    def close(self) -> None:
        """End the thread. Waits for nobody."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _claim(self, peer: RemotePeer, unit: UnitSpec, epoch: int) -> bool:
        """Whether this rank has to read the shard: it is the first of its host to ask for it in this epoch."""
        claims = peer.claims(unit)
        if claims.load(_EPOCH) >= epoch:
            return False
        with peer.claim_mutex(unit).held(self._layout.settings.timeout_s):
            if claims.load(_EPOCH) >= epoch:
                return False
            claims.store(_CLAIMER, self._layout.grid.me)
            claims.store(_EPOCH, epoch)
            return True

    def _read(self, peer: RemotePeer, unit: UnitSpec, epoch: int) -> None:
        place = peer.published_bytes(unit)[: unit.published_bytes]
        offset = self._layout.buffer_offset(unit, epoch)
        self._heaps.read(peer.member, f"published/{unit.index}", offset, place, f"unit {unit.name!r}")
        peer.cached(unit).store(0, epoch)  # release: the shard is there
        with self._changed:
            self._changed.notify_all()

    def _await(self, peer: RemotePeer, unit: UnitSpec, epoch: int, cached: Words, lane: str) -> None:
        claimer = peer.claims(unit).load(_CLAIMER)
        rank = self._layout.grid.ranks[claimer]
        what = f"rank {rank} to read unit {unit.name!r} of epoch {epoch} from rank {peer.rank}, for this host"
        there = functools.partial(_holds, cached, epoch)
        nap = functools.partial(nap_until, self._changed, there) if claimer == self._layout.grid.me else None
        self._protocol.waiter.until(there, claimer, what, lane=lane, nap=nap)


def nap_until(changed: threading.Condition, ready: Callable[[], bool]) -> None:
    """Sleep for a moment, or until whoever makes `ready` true notifies of it."""
    with changed:
        if not ready():
            changed.wait(NAP_S)


def _holds(cached: Words, epoch: int) -> bool:
    return cached.load(0) >= epoch


def gather_replicas(layout: HeapLayout, heaps: RemoteHeaps, used: Sequence[bool]) -> None:
    """Read the accumulators of replicas on other hosts, of the units that are `used`. They have been completed."""
    grid = layout.grid
    for number, member in sorted(enumerate(layout.contributors), key=lambda one: grid.steps_to(one[1])):
        into = layout.arrived(number)
        for unit in (unit for unit in layout.units if used[unit.index] and unit.accumulator_bytes):
            start, nbytes = layout.sums_at[unit.index], layout.sources * unit.accumulator_bytes
            place = into[start : start + nbytes]
            heaps.read(member, f"accumulator/{unit.index}", 0, place, f"the gradients of unit {unit.name!r}")


def parts(layout: HeapLayout, unit: UnitSpec) -> list[torch.Tensor]:
    """What adds up to this rank's shard of the gradient of `unit`, each 1-D [unit.numel], in the order in which to add.

    Per-source accumulators and those of replicas come in rank order, sums of hosts in the order of the hosts, whoever
    adds them. Parts from other hosts are those that were read; they may be rounded (`HeapLayout.rounded`).
    """
    grid = layout.grid
    if not grid.remote:
        members = grid.replica_group
        return [layout.local(m).accumulator(unit, source) for m in members for source in range(layout.sources)]
    arrived = {member: _arrived(layout, number, unit) for number, member in enumerate(layout.contributors)}
    if not grid.shards_span_hosts:
        mine = {m: layout.local(m) for m in grid.replica_group if not grid.is_remote(m)}
        return [
            mine[m].accumulator(unit, source) if m in mine else arrived[m][source]
            for m in grid.replica_group
            for source in range(layout.sources)
        ]
    found: list[tuple[int, torch.Tensor]] = []
    for host in range(grid.host_count):
        shards = [m % grid.shards for m in grid.shard_group if grid.host(m) == host]
        for slot in range(layout.sum_sources):
            source = shards[slot] if layout.sources > 1 else host
            if host == grid.here:
                own = layout.mine.accumulator(unit, source if layout.sources > 1 else 0)
                found.append((source, own))
            else:
                found.append((source, arrived[grid.partner(host)][slot]))
    return [part for _, part in sorted(found, key=lambda one: one[0])]


def _arrived(layout: HeapLayout, number: int, unit: UnitSpec) -> list[torch.Tensor]:
    start, dtype = layout.wire_at[unit.index], layout.rounded or unit.accumulator_dtype
    raw = layout.arrived(number)[start : start + layout.sum_sources * unit.numel * dtype.itemsize]
    return list(raw.view(dtype).view(layout.sum_sources, unit.numel))
