"""The heaps of a root's members, laid out alike, and the table of its peers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from odc.memory import MUTEX_BYTES, RobustMutex, SymmetricHeap
from odc.movers.choice import device_mover, mover_for
from odc.protocol.grid import RankGrid, refuse_unsupported
from odc.protocol.peers.local import LocalPeer
from odc.protocol.peers.remote import NodeShare, RemotePeer
from odc.protocol.regions import WIRE_DTYPES, Regions
from odc.protocol.units import UnitSpec
from odc.settings import Settings

_DATA = frozenset(
    {"published", "accumulator", "staging", "cache", "sums", "wire", "arrived", "landing"}
)  # regions on the heap's device; the others are words


class HeapLayout(Regions):
    """This rank's heap, and by member its peers', of whom each is attached when it is first asked for anything.

    `heap` is unsealed, the same on every member, and is sealed here; `units` are in the same order on every rank;
    `fingerprint` is further text on which the members must agree.
    """

    def __init__(
        self, heap: SymmetricHeap, grid: RankGrid, units: Sequence[UnitSpec], settings: Settings, fingerprint: str
    ) -> None:
        self.heap, self.mover = heap, mover_for(settings, heap.device, grid.shard)
        heap.adds_atomically = bool(getattr(self.mover, "atomic", True))
        refuse_unsupported(grid, kernels="auto" if heap.device.type == "cuda" else settings.kernels)
        super().__init__(grid, units, settings, heap.lanes.asynchronous)
        if heap.lanes.asynchronous:
            self._prepare_mover()
        for name, nbytes in self.requests():
            heap.allocate(name, nbytes, words=name.split("/")[0] not in _DATA)
        mesh = f"{grid.ranks}/{grid.shards}" + (f"/{grid.hosts}" if grid.hosts else "")
        mesh += f"/nodes of {grid.node_size}" if grid.node_size else ""
        parts = [settings.fingerprint(), mesh, fingerprint]
        heap.seal("|".join(parts + [unit.fingerprint() for unit in self.units]))
        self._initialize_mutexes("mutexes")
        if grid.nodes.shards_span_hosts:
            self._initialize_mutexes("node/mutexes")
        self._peers = [self._make_peer(member) for member in grid.members]
        self._shares = {
            member: NodeShare(heap, grid.nodes, member, self.sums_at[:-1])
            for member in (grid.nodes.remote if grid.nodes.shards_span_hosts else ())
        }

    def _prepare_mover(self) -> None:
        """No thread but this one, which trains, is to compile a kernel; gradients come in their parameter's dtype."""
        dtypes = [
            (spec.dtype, unit.accumulator_dtype if spec.trained and spec.dtype in WIRE_DTYPES else None)
            for unit in self.units
            for spec in unit.params
        ]
        mover = device_mover(self.mover)
        atomic = mover.atomic and (self.settings.accumulate == "direct" or self.grid.nodes.shards_span_hosts)
        mover.prepare(self.heap.device, dtypes, atomic)

    def _initialize_mutexes(self, region: str) -> None:
        address, nbytes = self.heap.address(self.grid.me, region), 8 * len(self.heap.words(self.grid.me, region))
        for at in range(0, nbytes, MUTEX_BYTES):
            RobustMutex.initialize(address + at)

    def _make_peer(self, member: int) -> LocalPeer | RemotePeer:
        parameters = self.param_base[-1]
        if self.grid.is_remote(member):
            return RemotePeer(self.heap, self.grid, member, parameters)
        return LocalPeer(self.heap, member, self.buffers, parameters)

    def peer(self, member: int) -> LocalPeer | RemotePeer:
        return self._peers[member]

    def local(self, member: int) -> LocalPeer:
        """A member on this host."""
        peer = self._peers[member]
        assert isinstance(peer, LocalPeer), f"member {member} is on another host"
        return peer

    def remote(self, member: int) -> RemotePeer:
        """A member on another host."""
        peer = self._peers[member]
        assert isinstance(peer, RemotePeer), f"member {member} is on this host"
        return peer

    @property
    def mine(self) -> LocalPeer:
        return self.local(self.grid.me)

    def holder(self, member: int) -> LocalPeer | NodeShare:
        """Where this rank reads the shards of a member of its shard group, and adds gradients for it."""
        return self._shares.get(member) or self.local(member)

    def share(self, member: int) -> NodeShare:
        """What this node keeps of a member of another node."""
        return self._shares[member]

    def node_sums(self, unit: UnitSpec) -> list[torch.Tensor]:
        """This node's sums of `unit` that lie in this rank's heap, one for each other node where shards span nodes."""
        nodes = self.grid.nodes
        if not nodes.shards_span_hosts:
            return []
        return [self.sums_of(nodes.me, row, unit) for row in range(nodes.host_count - 1)]

    def sums_of(self, member: int, row: int, unit: UnitSpec) -> torch.Tensor:
        """1-D [unit.numel]: in the heap of a member of this host, its node's sum for the `row`-th other."""
        at = self.sums_at[unit.index] // unit.accumulator_dtype.itemsize
        return self.heap.tensor(member, f"sums/{row}", unit.accumulator_dtype, offset=at, numel=unit.numel)

    def round_sums(self, unit: UnitSpec) -> None:
        """Where sums are rounded: write `node_sums` to where they are read from. On any thread; they have settled."""
        if (dtype := self.rounded) is None:
            return
        at, lanes = self.wire_at[unit.index] // dtype.itemsize, self.heap.lanes
        with lanes.lane("server"):
            for row, whole in enumerate(self.node_sums(unit)):
                self.heap.tensor(self.grid.me, f"wire/{row}", dtype, offset=at, numel=whole.numel()).copy_(whole)
            lanes.settle()

    def arrived(self, number: int) -> torch.Tensor:
        """uint8: where what was read from the `number`-th of `contributors` lies, laid out by `wire_at`."""
        return self.heap.tensor(self.grid.me, f"arrived/{number}", torch.uint8)

    @property
    def landing(self) -> torch.Tensor | None:
        """uint8: where this rank's reads for peers of its host land, on a device where shards span hosts."""
        if not self._reads_land:
            return None
        return self.heap.tensor(self.grid.me, "landing", torch.uint8)

    def is_mine(self, memory: torch.Tensor) -> bool:
        """Whether `memory`, of the heap of a rank of this host, is of this rank's."""
        mine = self.heap.whole(self.grid.me)
        return mine.data_ptr() <= memory.data_ptr() < mine.data_ptr() + mine.numel()

    @property
    def published_range(self) -> range:
        """Bytes of the heap that hold the published shards of all units, and nothing else."""
        if not self.units:
            return range(0)
        place, last = self.heap.layout, f"published/{len(self.units) - 1}"
        return range(place.offset("published/0"), place.offset(last) + place.size(last))

    def close(self) -> None:
        """Give the memory of all members back as soon as no view of it is in use; idempotent."""
        for peer in (*self._peers, *self._shares.values()):
            peer.forget()
        self.heap.close()
