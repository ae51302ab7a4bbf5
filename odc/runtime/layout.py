"""The heap of one root, by meaning: board, published shards, accumulators, staging rings.

Chose to fix every size when the root is initialised, from the units alone, so that the memory odc takes can be said
before training starts and never grows. `ledger()` is that account; the bound it is tested against:

    one published shard (compute dtype; two with `Settings.second_buffer`) + one accumulator shard of what is trained
    (fp32; fp64 when reproducible; W of them for "per_source") + staging of at most 2 x the largest unit's trained chunk
    for each peer + the queue's inputs (none unless `Settings.queue_bytes` asks for them) + words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from odc.memory import MUTEX_BYTES, RobustMutex, SymmetricHeap, Words
from odc.runtime.geometry import Geometry
from odc.runtime.movers.moves import moves_of
from odc.runtime.units import UnitSpec
from odc.runtime.words import BOARD_WORDS
from odc.settings import Settings

HEADER_WORDS = 5  # of a staged block: unit, first element, elements, wire dtype, slot
REASON_BYTES = 1024
_DATA = frozenset({"published", "accumulator", "staging"})  # regions on the heap's device; the others are words
WIRE_DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


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


class Space:
    """Named views into the heaps of all members; no waiting, no protocol.

    Args:
        heap: an unsealed heap, the same on every member; `seal()` is called here.
        geometry: who stands where.
        units: in the same order on every rank.
        settings: of the root.

    Attributes:
        moves: what moves the root's data.
    """

    def __init__(
        self, heap: SymmetricHeap, geometry: Geometry, units: Sequence[UnitSpec], settings: Settings, fingerprint: str
    ) -> None:
        self.heap, self.geometry, self.units, self.settings = heap, geometry, tuple(units), settings
        self.moves = moves_of(settings, heap.device)
        self.param_base = [0]
        for unit in self.units:
            self.param_base.append(self.param_base[-1] + len(unit.params))
        #: Made once: a view of shared memory costs more than to copy a small parameter.
        self._views: dict[tuple[str, int, int, int], torch.Tensor] = {}
        self._mutexes: dict[tuple[int, int], RobustMutex] = {}
        self.ring = Ring.fit(self.units, settings.staging_block_bytes)
        self.buffers = 2 if settings.second_buffer else 1
        self.sources = geometry.shards if settings.accumulate == "per_source" else 1
        for name, nbytes in self._requests():
            heap.allocate(name, nbytes, words=name.split("/")[0] not in _DATA)
        parts = [settings.fingerprint(), f"{geometry.ranks}/{geometry.shards}", fingerprint]
        heap.seal("|".join(parts + [unit.fingerprint() for unit in self.units]))
        for unit in self.units:
            RobustMutex.initialize(heap.address(geometry.me, "mutexes") + unit.index * MUTEX_BYTES)

    def _requests(self) -> list[tuple[str, int]]:
        members = len(self.geometry.ranks)
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
            for distance in range(1, self.geometry.shards):
                requests.append((f"headers/{distance}", self.ring.slots * HEADER_WORDS * 8))
                requests.append((f"staging/{distance}", self.ring.slots * self.ring.slot_bytes))
        if self.settings.queue_bytes:
            requests += [("claimed", 64), ("queue", -(-self.settings.queue_bytes // 64) * 64)]
        return requests

    def board(self, member: int) -> Words:
        """The member's status board (see `Word`). Attaches on demand."""
        return self.heap.words(member, "board")

    def sent(self, owner: int) -> Words:
        """Blocks each source has posted to `owner`, cumulative; word `source` is written by that source alone."""
        return self.heap.words(owner, "sent")

    def accumulated(self, owner: int) -> Words:
        """Blocks of each source that the owner's daemon has added, cumulative."""
        return self.heap.words(owner, "accumulated")

    def pushes(self, owner: int, source: int) -> torch.Tensor:
        """int64 [parameters]: cumulative pushes of each parameter by `source`, written by it before DONE."""
        count = self.param_base[-1]
        return self.heap.tensor(owner, "pushes", torch.int64, offset=source * count, numel=count)

    def buffer_offset(self, unit: UnitSpec, epoch: int) -> int:
        """Bytes from the start of a unit's published region to the buffer that holds `epoch`."""
        return epoch % self.buffers * unit.published_bytes

    def published(self, member: int, unit: UnitSpec, param: int, epoch: int = 0) -> torch.Tensor:
        """1-D [numel of a padded shard] in compute dtype, as of `epoch`; which epoch matters with two buffers only."""
        spec = unit.params[param]
        at = (self.buffer_offset(unit, epoch) + spec.published_offset) // spec.dtype.itemsize
        return self.heap.tensor(member, f"published/{unit.index}", spec.dtype, offset=at, numel=spec.numel)

    def published_bytes(self, member: int, unit: UnitSpec, epoch: int = 0) -> torch.Tensor:
        """uint8 [unit.published_bytes or more]: the member's published shard of `unit`, parameter after parameter."""
        key = ("published", member, unit.index, epoch % self.buffers)
        view = self._views.get(key)
        if view is None:
            at = self.buffer_offset(unit, epoch)
            view = self._views[key] = self.heap.tensor(member, f"published/{unit.index}", torch.uint8, offset=at)
        return view

    def accumulator(self, member: int, unit: UnitSpec, source: int = 0) -> torch.Tensor:
        """1-D [unit.numel] in the accumulator's dtype; `source` (a shard index) only with per-source accumulators."""
        key = ("accumulator", member, unit.index, source)
        view = self._views.get(key)
        if view is None:
            at, count = source * unit.numel, unit.numel
            view = self.heap.tensor(member, f"accumulator/{unit.index}", unit.accumulator_dtype, offset=at, numel=count)
            self._views[key] = view
        return view

    def mutex(self, member: int, unit: UnitSpec) -> RobustMutex:
        """The lock that guards adds into the member's accumulator of `unit`."""
        key = member, unit.index
        mutex = self._mutexes.get(key)
        if mutex is None:
            address = self.heap.address(member, "mutexes") + unit.index * MUTEX_BYTES
            what = f"the accumulator of unit {unit.name!r} on rank {self.geometry.ranks[member]}"
            # The words keep the memory mapped.
            mutex = self._mutexes[key] = RobustMutex(address, self.heap.words(member, "mutexes"), what)
        return mutex

    def claimed(self, member: int) -> Words:
        """Word 0: microbatches claimed from the queue whose home is `member`, in its current epoch.

        The others are the member's own (see `odc.runtime.queue`).
        """
        return self.heap.words(member, "claimed")

    def offers(self, member: int) -> torch.Tensor:
        """uint8 [queue_bytes, rounded up to 64]: the microbatches that the member offers, and their table."""
        return self.heap.tensor(member, "queue", torch.uint8)

    def reason(self, member: int) -> torch.Tensor:
        """uint8 [REASON_BYTES]: zero-terminated UTF-8 text, written before ABORT."""
        return self.heap.tensor(member, "reason", torch.uint8)

    def abandonment(self, member: int, epoch: int) -> torch.Tensor:
        """uint8 [REASON_BYTES]: why the member abandoned `epoch`, written before its outcome; zero-terminated UTF-8."""
        return self.heap.tensor(member, "abandoned", torch.uint8, offset=epoch % 2 * REASON_BYTES, numel=REASON_BYTES)

    def close(self) -> None:
        """Give the memory back, own and peers', as soon as no view of it is in use; idempotent."""
        self._views.clear()
        self._mutexes.clear()
        self.heap.close()

    def attach_all(self) -> None:
        """Reach every member, waiting for each to come up; raises as `SymmetricHeap.tensor` does."""
        for member in self.geometry.members:
            self.board(member)
        self.heap.base_addresses()

    def ledger(self) -> dict[str, int]:
        """Bytes by purpose: published, accumulator, staging, queue, words."""
        account = {"published": 0, "accumulator": 0, "staging": 0, "queue": 0, "words": 0}
        for name, nbytes in self._requests():
            kind = name.split("/")[0]
            account[{"headers": "words"}.get(kind, kind if kind in account else "words")] += nbytes
        return account
