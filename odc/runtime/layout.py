"""What lies where in the heap of a root: board, published shards, accumulators, staging rings.

Every size is fixed when the root is initialised, from its units alone (docs/architecture.md, "Memory").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from odc.errors import UnsupportedError
from odc.memory import MUTEX_BYTES, RobustMutex, SymmetricHeap
from odc.runtime.grid import RankGrid, refuse_unsupported
from odc.runtime.movers.choice import mover_for
from odc.runtime.peers.board import REASON_BYTES
from odc.runtime.peers.local import LocalPeer
from odc.runtime.peers.remote import RemotePeer, mirror_requests, node_requests, starts
from odc.runtime.units import UnitSpec
from odc.runtime.words import BOARD_WORDS
from odc.settings import Settings

HEADER_WORDS = 5  # of a staged block: unit, first element, elements, wire dtype, slot
_BLOCK_BYTES, _WHOLE = 1 << 20, 1 << 62  # of a staging block on the CPU and, all there is, on a device
_DATA = frozenset(
    {"published", "accumulator", "staging", "cache", "sums", "wire", "arrived"}
)  # regions on the heap's device; the others are words
WIRE_DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def refuse_rounding(grid: RankGrid, units: Sequence[UnitSpec], sums_dtype: str) -> None:
    """Raise `UnsupportedError` where sums cannot be rounded as the settings say; on one host none cross."""
    if not grid.remote or sums_dtype == "accumulator":
        return
    where = f"rank {grid.rank}: Settings(sums_dtype={sums_dtype!r})"
    if not grid.shards_span_hosts:
        raise UnsupportedError(f"{where} rounds what hosts add up for each other, but every replica lies on one host")
    for unit in units:
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
        sources: accumulators of each unit on each member.
        sum_sources: the same of a host's sums for a member of another host.
        sums_at: for each unit the bytes before its accumulators among the sums of all units, and the bytes of all.
        rounded: the dtype in which sums cross the network, if it is not the accumulators'.
        wire_at: as `sums_at`, of the sums as they cross.
        pushed_board: this rank's board, over hosts only.
    """

    def __init__(
        self, heap: SymmetricHeap, grid: RankGrid, units: Sequence[UnitSpec], settings: Settings, fingerprint: str
    ) -> None:
        self.heap, self.grid, self.units, self.settings = heap, grid, tuple(units), settings
        self.mover = mover_for(settings, heap.device, grid.shard)
        self.param_base = [0]
        for unit in self.units:
            self.param_base.append(self.param_base[-1] + len(unit.params))
        whole = heap.lanes.asynchronous  # a device copies a chunk at once, and every block costs it a wait
        self.ring = Ring.fit(self.units, settings.staging_block_bytes or (_WHOLE if whole else _BLOCK_BYTES))
        self.buffers = 2 if settings.second_buffer else 1
        self.sources = grid.shards if settings.accumulate == "per_source" else 1
        refuse_unsupported(grid, queue_bytes=settings.queue_bytes, kernels=settings.kernels)
        self.sum_sources = min(self.sources, len(grid.local_shard_group))
        self.rounded = torch.bfloat16 if grid.remote and settings.sums_dtype == "bfloat16" else None
        refuse_rounding(grid, self.units, settings.sums_dtype)
        self.sums_at = starts(self.units, self.sum_sources)
        self.wire_at = starts(self.units, self.sum_sources, self.rounded)
        self._node_sums: dict[int, list[torch.Tensor]] = {}
        for name, nbytes in self._requests():
            heap.allocate(name, nbytes, words=name.split("/")[0] not in _DATA)
        mesh = f"{grid.ranks}/{grid.shards}" + (f"/{grid.hosts}" if grid.hosts else "")
        parts = [settings.fingerprint(), mesh, fingerprint]
        heap.seal("|".join(parts + [unit.fingerprint() for unit in self.units]))
        for unit in self.units:
            RobustMutex.initialize(heap.address(grid.me, "mutexes") + unit.index * MUTEX_BYTES)
        self._peers = [self._make_peer(member) for member in grid.members]
        if grid.remote:
            self._initialize_node()

    def _make_peer(self, member: int) -> LocalPeer | RemotePeer:
        parameters = self.param_base[-1]
        if self.grid.is_remote(member):
            return RemotePeer(self.heap, self.grid, member, parameters, self.sums_at[:-1], self.sum_sources)
        return LocalPeer(self.heap, member, self.buffers, parameters)

    def _initialize_node(self) -> None:
        self.pushed_board = self.mine.push_board()
        if self.grid.shards_span_hosts:
            address, size = self.heap.address(self.grid.me, "node/mutexes"), self.heap.layout.size("node/mutexes")
            for at in range(0, size, MUTEX_BYTES):
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
        for unit in self.units:
            requests.append((f"published/{unit.index}", max(64, self.buffers * unit.published_bytes)))
            requests.append((f"accumulator/{unit.index}", max(64, self.sources * unit.accumulator_bytes)))
        if self.settings.accumulate == "server":
            for distance in range(1, len(self.grid.local_shard_group)):
                requests.append((f"headers/{distance}", self.ring.slots * HEADER_WORDS * 8))
                requests.append((f"staging/{distance}", self.ring.slots * self.ring.slot_bytes))
        if self.settings.queue_bytes:
            requests += [("claimed", 64), ("queue", -(-self.settings.queue_bytes // 64) * 64)]
        return requests + self._requests_over_hosts()

    def _requests_over_hosts(self) -> list[tuple[str, int]]:
        grid = self.grid
        if not grid.remote:
            return []
        requests = mirror_requests(grid, self.param_base[-1])
        if grid.shards_span_hosts:
            requests += node_requests(grid, self.units, self.sums_at[-1], self.wire_at[-1] if self.rounded else 0)
        arrived = max(64, self.wire_at[-1])
        return requests + [(f"arrived/{number}", arrived) for number in range(len(self.contributors))]

    @property
    def contributors(self) -> tuple[int, ...]:
        """Members on other hosts whose memory holds a part of this rank's gradients, in the order of their parts: its
        partners, with their hosts' sums, or its replicas, with their accumulators.
        """
        grid = self.grid
        if grid.shards_span_hosts:
            return grid.partners
        return tuple(member for member in grid.replica_group if grid.is_remote(member))

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

    def node_sums(self, unit: UnitSpec) -> list[torch.Tensor]:
        """This host's sums of `unit` that lie in this rank's heap, one for each other host where shards span hosts."""
        if not self.grid.shards_span_hosts:
            return []
        found = self._node_sums.get(unit.index)
        if found is None:
            found = self._node_sums[unit.index] = self._by_host("sums", self.sums_at, unit, unit.accumulator_dtype)
        return found

    def round_sums(self, unit: UnitSpec) -> None:
        """Where sums are rounded: write `node_sums` to where they are read from."""
        if self.rounded is not None:
            for whole, rounded in zip(
                self.node_sums(unit), self._by_host("wire", self.wire_at, unit, self.rounded), strict=True
            ):
                rounded.copy_(whole)

    def _by_host(self, name: str, starts_at: list[int], unit: UnitSpec, dtype: torch.dtype) -> list[torch.Tensor]:
        at, count = starts_at[unit.index] // dtype.itemsize, self.sum_sources * unit.numel
        rows = range(self.grid.host_count - 1)
        with torch.inference_mode(False):  # one made in inference mode could never be written outside of it
            return [self.heap.tensor(self.grid.me, f"{name}/{row}", dtype, offset=at, numel=count) for row in rows]

    def arrived(self, number: int) -> torch.Tensor:
        """uint8: where what was read from the `number`-th of `contributors` lies, laid out as `wire_at` says."""
        return self.heap.tensor(self.grid.me, f"arrived/{number}", torch.uint8)

    def buffer_offset(self, unit: UnitSpec, epoch: int) -> int:
        """Bytes from the start of a unit's published region to the buffer that holds `epoch`."""
        return epoch % self.buffers * unit.published_bytes

    def attach_all(self) -> None:
        """Reach every member, waiting for each to come up; raises as `SymmetricHeap.tensor` does."""
        for peer in self._peers:
            peer.attach()
        if not self.grid.remote:
            self.heap.base_addresses()

    def close(self) -> None:
        """Give the memory of all members back as soon as no view of it is in use; idempotent."""
        for peer in self._peers:
            peer.forget()
        self._node_sums.clear()
        self.heap.close()

    def ledger(self) -> dict[str, int]:
        """Bytes by purpose: published, accumulator, staging, queue, words; over hosts also cache and sums."""
        account = {"published": 0, "accumulator": 0, "staging": 0, "queue": 0, "words": 0}
        if self.grid.remote:
            account |= {"cache": 0, "sums": 0}
        for name, nbytes in self._requests():
            kind = name.split("/")[0]
            part_of = {"headers": "words", "arrived": "sums", "wire": "sums"}
            account[part_of.get(kind, kind if kind in account else "words")] += nbytes
        return account
