"""What lies where in the heap of a root: board, published shards, accumulators, staging rings.

Every size is fixed when the root is initialised, from its units alone (docs/architecture.md, "Memory").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from odc.errors import UnsupportedError
from odc.memory import MUTEX_BYTES, RobustMutex, SymmetricHeap
from odc.movers.choice import mover_for
from odc.protocol.grid import RankGrid, refuse_unsupported
from odc.protocol.peers.board import REASON_BYTES
from odc.protocol.peers.local import LocalPeer
from odc.protocol.peers.remote import NodeShare, RemotePeer, mirror_requests, node_requests, starts
from odc.protocol.units import UnitSpec
from odc.protocol.words import BOARD_WORDS
from odc.settings import Settings

HEADER_WORDS = 5  # of a staged block: unit, first element, elements, wire dtype, slot
_BLOCK_BYTES, _WHOLE = 1 << 20, 1 << 62  # of a staging block on the CPU and, all there is, on a device
_LANDING_BYTES = 16 << 20
_DATA = frozenset(
    {"published", "accumulator", "staging", "cache", "sums", "wire", "arrived", "landing"}
)  # regions on the heap's device; the others are words
# Of regions, by the first part of their names.
_ACCOUNTS = {"headers": "words", "arrived": "sums", "wire": "sums", "landing": "cache"}
WIRE_DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def refuse_rounding(layout: HeapLayout, sums_dtype: str) -> None:
    """Raise `UnsupportedError` where sums cannot be rounded as the settings say; on one host none cross."""
    if not layout.grid.remote or sums_dtype == "accumulator":
        return
    where = f"rank {layout.grid.rank}: Settings(sums_dtype={sums_dtype!r})"
    if not layout.spans_hosts:
        raise UnsupportedError(f"{where} is for a mesh whose shards lie on several hosts")
    for unit in layout.units:
        if unit.accumulator_dtype == torch.float64:
            raise UnsupportedError(f"{where} would round the fp64 sums of unit {unit.name!r}")


@dataclass(frozen=True)
class Ring:
    """Shape of every staging ring: `slots` blocks of `slot_bytes`."""

    slots: int
    slot_bytes: int

    @classmethod
    def fit(cls, units: Sequence[UnitSpec], block_bytes: int) -> Ring:
        """Two blocks at least, no more than 2 x the largest chunk in all: gradients travel in the compute dtype."""
        chunk = max((-(-unit.pushed_bytes // 64) * 64 for unit in units), default=64)
        slot = max(64, min(block_bytes, chunk))
        return cls(max(2, 2 * chunk // slot), slot)


class HeapLayout:
    """The heaps of all members of a root, laid out alike; no waiting, no protocol.

    `heap` is unsealed, the same on every member, and is sealed here; `units` are in the same order on every rank;
    `fingerprint` is further text on which the members must agree.

    Attributes:
        param_base: for each unit the number of parameters in the units before it.
        buffers: published versions side by side, 1 or 2.
        shares: into which replicas divide what they accumulated, to sum one each; 1 where each sums all of it.
        sums_at: for each unit the bytes before its accumulators among the sums of all units, and the bytes of all.
        spans_hosts: whether shards lie on several hosts, each a node: sums leave as they are complete.
        rounded: the dtype in which sums cross the network, if it is not the accumulators'.
        wire_at: as `sums_at`, of the sums as they cross.
        stages: whether pushes to other ranks of the shard group go through staging slots.
    """

    def __init__(
        self, heap: SymmetricHeap, grid: RankGrid, units: Sequence[UnitSpec], settings: Settings, fingerprint: str
    ) -> None:
        self.heap, self.grid, self.units, self.settings = heap, grid, tuple(units), settings
        self.mover = mover_for(settings, heap.device, grid.shard)
        self._on_device = heap.lanes.asynchronous
        self.param_base = [0]
        for unit in self.units:
            self.param_base.append(self.param_base[-1] + len(unit.params))
        most = _WHOLE if self._on_device else _BLOCK_BYTES  # a device copies a chunk at once; every block is a wait
        self.ring = Ring.fit(self.units, settings.staging_block_bytes or most)
        self.buffers = 2 if settings.second_buffer else 1
        refuse_unsupported(grid, kernels="auto" if heap.device.type == "cuda" else settings.kernels)
        replicas = len(grid.replica_group)
        self.shares = replicas if replicas > 2 else 1  # two read as much either way
        self.spans_hosts = bool(grid.remote) and grid.nodes is grid and grid.shards_span_hosts
        # Every rank of a host adds to its sums; in CPU memory to the accumulators there as well.
        self.stages = settings.accumulate == "server" and (self._on_device or not self.spans_hosts)
        refuse_rounding(self, settings.sums_dtype)
        self.rounded = torch.bfloat16 if self.spans_hosts and settings.sums_dtype == "bfloat16" else None
        self.sums_at = starts(self.units, self.shares)
        self.wire_at = starts(self.units, self.shares, self.rounded)
        for name, nbytes in self._requests():
            heap.allocate(name, nbytes, words=name.split("/")[0] not in _DATA)
        mesh = f"{grid.ranks}/{grid.shards}" + (f"/{grid.hosts}" if grid.hosts else "")
        mesh += f"/nodes of {grid.node_size}" if grid.node_size else ""
        parts = [settings.fingerprint(), mesh, fingerprint]
        heap.seal("|".join(parts + [unit.fingerprint() for unit in self.units]))
        for unit in self.units:
            RobustMutex.initialize(heap.address(grid.me, "mutexes") + unit.index * MUTEX_BYTES)
        self._peers = [self._make_peer(member) for member in grid.members]
        self._shares = {
            member: NodeShare(heap, grid.nodes, member, self.sums_at[:-1])
            for member in (grid.nodes.remote if grid.nodes.shards_span_hosts else ())
        }
        self._initialize_node()

    def _make_peer(self, member: int) -> LocalPeer | RemotePeer:
        parameters = self.param_base[-1]
        if self.grid.is_remote(member):
            return RemotePeer(self.heap, self.grid, member, parameters)
        return LocalPeer(self.heap, member, self.buffers, parameters)

    def _initialize_node(self) -> None:
        if self.grid.nodes.shards_span_hosts:
            region = self.grid.me, "node/mutexes"
            address, nbytes = self.heap.address(*region), 8 * len(self.heap.words(*region))
            for at in range(0, nbytes, MUTEX_BYTES):
                RobustMutex.initialize(address + at)

    def _requests(self) -> list[tuple[str, int]]:
        members = len(self.grid.ranks)
        requests = [
            ("board", BOARD_WORDS * 8),
            ("reason", REASON_BYTES),
            ("abandoned", 2 * REASON_BYTES),
            ("sent", members * 8),
            ("accumulated", members * 8),
            ("pushes", max(1, members * self.param_base[-1]) * 8),
            ("mutexes", max(1, len(self.units)) * MUTEX_BYTES),
        ]
        # Side by side, because readers outside the job may read this range and nothing else: see `published_range`.
        requests += [(f"published/{one.index}", max(64, self.buffers * one.published_bytes)) for one in self.units]
        requests += [(f"accumulator/{one.index}", max(64, one.accumulator_bytes)) for one in self.units]
        if self.stages:
            for distance in range(1, len(self.grid.nodes.local_shard_group)):
                requests.append((f"headers/{distance}", self.ring.slots * HEADER_WORDS * 8))
                requests.append((f"staging/{distance}", self.ring.slots * self.ring.slot_bytes))
        if self.settings.queue_bytes:
            requests += [("claimed", 64), ("queue", -(-self.settings.queue_bytes // 64) * 64)]
        return requests + self._requests_over_nodes()

    def _requests_over_nodes(self) -> list[tuple[str, int]]:
        grid = self.grid
        requests = mirror_requests(grid, self.param_base[-1]) if grid.remote else []
        if grid.nodes.shards_span_hosts:
            requests += node_requests(grid.nodes, self.units, self.sums_at[-1])
            if self._reads_land:
                most = max((unit.published_bytes for unit in self.units), default=_LANDING_BYTES)
                requests.append(("landing", max(64, min(_LANDING_BYTES, most))))
        if self.spans_hosts:
            requests.append(("node/lasts", max(1, len(self.units)) * 2 * 8))
        if self.rounded is not None:
            requests += [(f"wire/{row}", max(64, self.wire_at[-1])) for row in range(grid.host_count - 1)]
        arrived = max(64, self.wire_at[-1])
        return requests + [(f"arrived/{number}", arrived) for number in range(len(self.contributors))]

    @property
    def contributors(self) -> tuple[int, ...]:
        """Members on other hosts whose memory holds a part of this rank's gradients, in the order of their parts: its
        partners, with their nodes' sums, or its replicas, with their accumulators.
        """
        nodes = self.grid.nodes
        found = nodes.partners if nodes.shards_span_hosts else self.grid.replica_group
        return tuple(member for member in found if self.grid.is_remote(member))

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
        """uint8: where what was read from the `number`-th of `contributors` lies, laid out as `wire_at` says."""
        return self.heap.tensor(self.grid.me, f"arrived/{number}", torch.uint8)

    @property
    def _reads_land(self) -> bool:
        """Whether this rank reads from other hosts into memory of its peers' devices."""
        return self._on_device and bool(self.grid.remote) and self.grid.nodes.shards_span_hosts

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

    def buffer_offset(self, unit: UnitSpec, epoch: int) -> int:
        """Bytes from the start of a unit's published region to the buffer that holds `epoch`."""
        return epoch % self.buffers * unit.published_bytes

    def attach_all(self) -> None:
        """Reach every member, waiting for each to come up; raises as `SymmetricHeap.tensor` does."""
        for peer in self._peers:
            peer.attach()
        for member in self.grid.local:
            self.heap.whole(member)

    def close(self) -> None:
        """Give the memory of all members back as soon as no view of it is in use; idempotent."""
        for peer in (*self._peers, *self._shares.values()):
            peer.forget()
        self.heap.close()

    def ledger(self) -> dict[str, int]:
        """Bytes by purpose: published, accumulator, staging, queue, words; over nodes also cache and sums."""
        account = {"published": 0, "accumulator": 0, "staging": 0, "queue": 0, "words": 0}
        if self.grid.nodes.remote:
            account |= {"cache": 0, "sums": 0}
        for name, nbytes in self._requests():
            kind = name.split("/")[0]
            account[_ACCOUNTS.get(kind, kind if kind in account else "words")] += nbytes
        return account
