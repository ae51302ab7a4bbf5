"""Staging rings: how a pushed block reaches the owner's daemon in bounded memory.

Chose one single-producer single-consumer ring for each pair of ranks over a shared queue: no lock, and a slow owner
holds up only what is pushed to it. `SENT[source]` is the ring's head and `ACCUMULATED[source]` its tail; both are
cumulative, so head minus tail is the number of slots in use and the credit left is what remains of `slots`. A pusher
without credit waits (the wait has a deadline); nothing is queued beyond the ring.

Blocks are taken in the order in which they were posted, but the slot that came back last is filled next: an owner that
keeps up leaves its blocks in the cache, however long the ring is. So a block's header says in which slot it lies.
"""

from __future__ import annotations

from collections import deque

import torch

from odc.memory import Words
from odc.runtime.layout import HEADER_WORDS, WIRE_DTYPES, Space
from odc.runtime.units import Piece, UnitSpec

_WIRE_CODES = {dtype: code for code, dtype in enumerate(WIRE_DTYPES)}
_SLOT = 4  # word of a header


class Outbox:
    """The pusher's end of the ring to one owner; used by one thread at a time.

    Args:
        space: the root's heaps.
        owner: member index of the owner, another than the own.
    """

    def __init__(self, space: Space, owner: int) -> None:
        geometry = space.geometry
        distance = geometry.distance(geometry.shard, owner % geometry.shards)
        self.owner, self.ring = owner, space.ring
        self._source, self._put, self._lanes = geometry.me, space.moves.put, space.heap.lanes
        self._data = space.heap.address(owner, f"staging/{distance}")
        self._headers = space.heap.tensor(owner, f"headers/{distance}", torch.int64).view(-1, HEADER_WORDS).numpy()
        self._sent, self._accumulated = space.sent(owner), space.accumulated(owner)
        self.posted, self._returned = self._sent.load(self._source), self._accumulated.load(self._source)
        self._told = self.posted
        slots = self.ring.slots
        #: Slots of the blocks on their way, in the order of posting; the free ones, the next to fill last.
        self._away = deque(int(self._headers[i % slots, _SLOT]) for i in range(self._returned, self.posted))
        self._free = [slot for slot in reversed(range(slots)) if slot not in self._away]

    def credit(self) -> int:
        """Free slots."""
        returned = self._accumulated.load(self._source)  # acquire: the owner has read what lay in the slots
        for _ in range(returned - self._returned):
            self._free.append(self._away.popleft())
        self._returned = returned
        return len(self._free)

    def put(self, at_byte: int, address: int, nbytes: int) -> None:
        """Copy `nbytes` from `address` into the slot to be posted next, at `at_byte`. `credit()` must have said so."""
        self._put(self._data + self._free[-1] * self.ring.slot_bytes + at_byte, address, nbytes)

    def post(self, unit: UnitSpec, first: int, numel: int, dtype: torch.dtype) -> None:
        """Hand the filled slot over: elements [first, first + numel) of `unit`. On a device `tell` makes it seen."""
        slot = self._free.pop()
        self._away.append(slot)
        self._headers[self.posted % self.ring.slots] = (unit.index, first, numel, _WIRE_CODES[dtype], slot)
        self.posted += 1
        if not self._lanes.asynchronous:
            self.tell()

    def tell(self) -> bool:
        """Let the owner see all that was posted; whether that was news. On the CPU every post does it.

        On a device it waits for the copies into the slots, so several posts share one wait.
        """
        if self._told == self.posted:
            return False
        self._lanes.settle()
        self._sent.store(self._source, self.posted)  # release: data and header are visible before the head moves
        self._told = self.posted
        return True


class Inbox:
    """The owner's end of the ring from one source; used by the daemon alone.

    Args:
        space: the root's heaps.
        source: member index of the pusher, another than the own.
    """

    def __init__(self, space: Space, source: int) -> None:
        geometry = space.geometry
        me = geometry.me
        distance = geometry.distance(source % geometry.shards, geometry.shard)
        self.source, self._units, self._slots = source, space.units, space.ring.slots
        data = space.heap.tensor(me, f"staging/{distance}", torch.uint8).view(-1, space.ring.slot_bytes)
        self._data = [data.view(dtype) for dtype in WIRE_DTYPES]
        self._headers = space.heap.tensor(me, f"headers/{distance}", torch.int64).view(-1, HEADER_WORDS).numpy()
        self._sent: Words = space.sent(me)
        self._accumulated: Words = space.accumulated(me)
        self._taken = self._accumulated.load(source)

    def waiting(self) -> int:
        """Posted blocks that are not yet taken: slots in use."""
        return self._sent.load(self.source) - self._taken

    def peek(self, most: int = 1) -> tuple[UnitSpec, list[Piece]] | None:
        """The oldest blocks, up to `most` and of one unit, in wire dtype; views into their slots. None if empty."""
        found: list[Piece] = []
        index = -1
        for at in range(self._taken, self._taken + min(most, self.waiting())):
            unit, first, numel, code, slot = self._headers[at % self._slots].tolist()
            if found and unit != index:
                break
            index = unit
            found.append(Piece(first, self._data[code][slot, :numel]))
        return (self._units[index], found) if found else None

    def take(self, count: int = 1) -> None:
        """Return the slots of the `count` oldest blocks to their pusher, after their values were added."""
        self._taken += count
        self._accumulated.store(self.source, self._taken)  # release: the sum is visible before the credit returns
