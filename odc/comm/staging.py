"""Staging rings: how a pushed block reaches the owner's daemon in bounded memory.

Chose one single-producer single-consumer ring for each pair of ranks over a shared queue: no lock, and a slow owner
holds up only what is pushed to it. `SENT[source]` is the ring's head and `ACCUMULATED[source]` its tail; both are
cumulative, so head minus tail is the number of slots in use and the credit left is what remains of `slots`. A pusher
without credit waits (the wait has a deadline); nothing is queued beyond the ring.
"""

from __future__ import annotations

import ctypes

import torch

from odc.comm.space import HEADER_WORDS, WIRE_DTYPES, Space
from odc.comm.units import UnitSpec
from odc.memory import Words


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
        self._source = geometry.me
        self._data = space.heap.address(owner, f"staging/{distance}")
        self._headers = space.heap.tensor(owner, f"headers/{distance}", torch.int64).view(-1, HEADER_WORDS).numpy()
        self._sent, self._accumulated = space.sent(owner), space.accumulated(owner)
        self.posted = self._sent.load(self._source)

    def credit(self) -> int:
        """Free slots."""
        return self.ring.slots - (self.posted - self._accumulated.load(self._source))

    def put(self, at_byte: int, address: int, nbytes: int) -> None:
        """Copy `nbytes` from `address` into the slot to be posted next, at `at_byte`. Needs credit."""
        slot = self._data + (self.posted % self.ring.slots) * self.ring.slot_bytes
        ctypes.memmove(slot + at_byte, address, nbytes)

    def post(self, unit: UnitSpec, first: int, numel: int, dtype: torch.dtype) -> None:
        """Hand the filled slot over: elements [first, first + numel) of `unit`."""
        self._headers[self.posted % self.ring.slots] = (unit.index, first, numel, WIRE_DTYPES.index(dtype))
        self.posted += 1
        self._sent.store(self._source, self.posted)  # release: data and header are visible before the head moves


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
        self.source, self._space = source, space
        self._data = space.heap.tensor(me, f"staging/{distance}", torch.uint8).view(-1, space.ring.slot_bytes)
        self._headers = space.heap.tensor(me, f"headers/{distance}", torch.int64).view(-1, HEADER_WORDS).numpy()
        self._sent: Words = space.sent(me)
        self._accumulated: Words = space.accumulated(me)
        self._taken = self._accumulated.load(source)

    def waiting(self) -> int:
        """Posted blocks that are not yet taken: slots in use."""
        return self._sent.load(self.source) - self._taken

    def peek(self) -> tuple[UnitSpec, int, torch.Tensor] | None:
        """(unit, first element, values 1-D in wire dtype) of the oldest block, a view into its slot; None if empty."""
        if not self.waiting():
            return None
        slot = self._taken % self._space.ring.slots
        unit, first, numel, code = (int(word) for word in self._headers[slot])
        dtype = WIRE_DTYPES[code]
        values = self._data[slot, : numel * dtype.itemsize].view(dtype)
        return self._space.units[unit], first, values

    def take(self) -> None:
        """Return the oldest slot to its pusher, after its values were added."""
        self._taken += 1
        self._accumulated.store(self.source, self._taken)  # release: the sum is visible before the credit returns
