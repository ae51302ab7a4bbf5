"""What lies where in the heap of a root: board, published shards, accumulators, staging rings.

Every size is fixed when the root is initialised, from its units alone (docs/architecture.md, "Memory").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from odc.memory import MUTEX_BYTES, RobustMutex, SymmetricHeap
from odc.runtime.movers.choice import mover_for
from odc.runtime.peers.local import REASON_BYTES, LocalPeer
from odc.runtime.units import UnitSpec
from odc.runtime.words import BOARD_WORDS
from odc.settings import Settings

HEADER_WORDS = 5  # of a staged block: unit, first element, elements, wire dtype, slot
_BLOCK_BYTES, _WHOLE = 1 << 20, 1 << 62  # of a staging block on the CPU and, all there is, on a device
_DATA = frozenset({"published", "accumulator", "staging"})  # regions on the heap's device; the others are words
WIRE_DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class RankGrid:
    """The ranks of one root's mesh, by replica and by shard: global ranks of the members, and `shards` to a replica.

    Memory is addressed by *member*: replica * shards + shard, the order of the mesh; `me` is this rank's. Messages name
    global ranks, never members.
    """

    ranks: tuple[int, ...]
    shards: int
    me: int

    def __post_init__(self) -> None:
        if self.shards < 1 or len(self.ranks) % self.shards or len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"{len(self.ranks)} ranks {self.ranks} do not form groups of {self.shards} shards")
        if not 0 <= self.me < len(self.ranks):
            raise ValueError(f"member {self.me} is not one of {len(self.ranks)}")

    @property
    def rank(self) -> int:
        """This rank's global rank."""
        return self.ranks[self.me]

    @property
    def members(self) -> range:
        return range(len(self.ranks))

    @property
    def shard(self) -> int:
        """This rank's shard index, 0 to shards - 1."""
        return self.me % self.shards

    @property
    def shard_group(self) -> tuple[int, ...]:
        """Members of this rank's replica by shard index: the owners it fetches from and pushes to."""
        start = self.me - self.shard
        return tuple(range(start, start + self.shards))

    @property
    def replica_group(self) -> tuple[int, ...]:
        """Members that own the same shard as this rank, in rank order; this rank alone without hybrid sharding."""
        return tuple(range(self.shard, len(self.ranks), self.shards))

    def others(self) -> tuple[int, ...]:
        """Every other member, starting with the next one, so that ranks do not all visit the same peer first."""
        n = len(self.ranks)
        return tuple((self.me + step) % n for step in range(1, n))

    def shard_group_from_next(self) -> tuple[int, ...]:
        """The shard group, starting with the next shard and ending with this rank's own."""
        group, at = self.shard_group, self.shard
        return tuple(group[(at + step) % self.shards] for step in range(1, self.shards + 1))

    def distance(self, source: int, owner: int) -> int:
        """Steps from shard `source` forward to shard `owner` in a shard group; names the staging ring between them."""
        return (owner - source) % self.shards


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
        for name, nbytes in self._requests():
            heap.allocate(name, nbytes, words=name.split("/")[0] not in _DATA)
        parts = [settings.fingerprint(), f"{grid.ranks}/{grid.shards}", fingerprint]
        heap.seal("|".join(parts + [unit.fingerprint() for unit in self.units]))
        for unit in self.units:
            RobustMutex.initialize(heap.address(grid.me, "mutexes") + unit.index * MUTEX_BYTES)
        self._peers = [LocalPeer(heap, member, self.buffers, self.param_base[-1]) for member in grid.members]

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
            for distance in range(1, self.grid.shards):
                requests.append((f"headers/{distance}", self.ring.slots * HEADER_WORDS * 8))
                requests.append((f"staging/{distance}", self.ring.slots * self.ring.slot_bytes))
        if self.settings.queue_bytes:
            requests += [("claimed", 64), ("queue", -(-self.settings.queue_bytes // 64) * 64)]
        return requests

    def peer(self, member: int) -> LocalPeer:
        return self._peers[member]

    @property
    def mine(self) -> LocalPeer:
        return self._peers[self.grid.me]

    def buffer_offset(self, unit: UnitSpec, epoch: int) -> int:
        """Bytes from the start of a unit's published region to the buffer that holds `epoch`."""
        return epoch % self.buffers * unit.published_bytes

    def attach_all(self) -> None:
        """Reach every member, waiting for each to come up; raises as `SymmetricHeap.tensor` does."""
        for peer in self._peers:
            peer.attach()
        self.heap.base_addresses()

    def close(self) -> None:
        """Give the memory of all members back as soon as no view of it is in use; idempotent."""
        for peer in self._peers:
            peer.forget()
        self.heap.close()

    def ledger(self) -> dict[str, int]:
        """Bytes by purpose: published, accumulator, staging, queue, words."""
        account = {"published": 0, "accumulator": 0, "staging": 0, "queue": 0, "words": 0}
        for name, nbytes in self._requests():
            kind = name.split("/")[0]
            account[{"headers": "words"}.get(kind, kind if kind in account else "words")] += nbytes
        return account
