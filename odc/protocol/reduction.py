"""How ranks bring together what they hold of each other's gradients, at the end of a minibatch.

    two replicas    wait: COMPLETE | read the other's accumulators | add
    N > 2           wait: COMPLETE | read the others' N-ths | add this rank's N-th up | REDUCED
                    wait: REDUCED | read the sums of the others' N-ths

Every replica adds in one order, so that all hold the same bits. The second way moves 2 (N-1)/N of an accumulator in
place of N-1. Sums of nodes are in `odc.hosts.sums`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from odc.movers.plans import Rounding
from odc.protocol.heap_reader import HeapRead, HeapReader
from odc.protocol.protocol import MemberProtocol
from odc.protocol.units import UnitSpec


@dataclass(frozen=True)
class RoundedSum:
    """A sum as it has crossed the network, rounded, in `memory`."""

    rounding: Rounding
    memory: torch.Tensor

    def add_to(self, total: torch.Tensor, into: torch.Tensor) -> None:
        """Write `total` plus this, both fp32 [numel], to `into`, which may be `total`."""
        self.rounding.add(total, self.memory, into)


class Reduction(ABC):
    """What one rank does, on its main thread, in each epoch with pushes, in this order: `complete` when all ranks are
    DONE, then `gather` or, if the minibatch is abandoned, `skip`, then `parts` of any unit. At the end `close`.

    `used` holds for each unit whether any rank pushed to it.
    """

    def __init__(self, protocol: MemberProtocol) -> None:
        self._protocol, self._layout = protocol, protocol.layout

    def complete(self, used: Sequence[bool]) -> None:
        """COMPLETE: what this rank holds of others' gradients holds every push."""
        self._protocol.complete()

    @abstractmethod
    def gather(self, used: Sequence[bool]) -> None:
        """Bring here what others hold of this rank's gradients; waits until they have completed it."""

    def skip(self) -> None:
        """Gather nothing in this epoch."""
        return

    @abstractmethod
    def parts(self, unit: UnitSpec) -> Iterator[torch.Tensor | RoundedSum]:
        """What adds up to this rank's shard of the gradient of `unit`, each 1-D [unit.numel], in the order in which to
        add. The first one is a tensor.
        """

    def close(self) -> None:
        """End its threads. Does not wait; on any thread."""
        return


class OneOwner(Reduction):
    """Every shard has one owner, to which all its gradients are pushed."""

    def gather(self, used: Sequence[bool]) -> None:
        return

    def parts(self, unit: UnitSpec) -> Iterator[torch.Tensor]:
        yield self._layout.mine.accumulator(unit)


class Replicas(Reduction):
    """Hybrid sharding: every replica's owner of a shard has accumulated a part of its gradient."""

    def __init__(self, protocol: MemberProtocol, heaps: HeapReader) -> None:
        super().__init__(protocol)
        self._heaps, self._group = heaps, protocol.grid.replica_group
        self._place = self._group.index(protocol.grid.me)

    def gather(self, used: Sequence[bool]) -> None:
        layout, steps_to = self._layout, self._layout.grid.steps_to
        units = [unit for unit in layout.units if used[unit.index] and unit.numel]
        contributors = sorted(enumerate(layout.contributors), key=lambda one: steps_to(one[1]))
        self._heaps.read_all(
            self._read_of(member, unit, self._mine(unit), self._arrived(number, unit))
            for number, member in contributors
            for unit in units
        )
        if layout.shares > 1:
            self._share_sums(units)

    def _share_sums(self, units: Sequence[UnitSpec]) -> None:
        """Add this rank's N-th of every unit up, in its accumulators, and read the others' into them."""
        layout = self._layout
        for unit in units:
            first, *others = self._accumulated(unit)
            total = first.clone()
            for part in others:
                total.add_(part)
            layout.mine.accumulator(unit)[self._mine(unit)] = total  # which no other rank reads before REDUCED
        layout.heap.lanes.settle()
        self._protocol.end_reducing()
        for place in [*range(self._place + 1, len(self._group)), *range(self._place)]:
            # It has read its N-th of this rank's accumulators, so there is room for the sum.
            self._protocol.await_reduced(self._group[place])
            self._heaps.read_all(
                self._read_of(self._group[place], unit, share, layout.mine.accumulator(unit)[share])
                for unit in units
                for share in [self._share(unit, place)]
            )

    def parts(self, unit: UnitSpec) -> Iterator[torch.Tensor]:
        yield from self._accumulated(unit) if self._layout.shares == 1 else [self._layout.mine.accumulator(unit)]

    def _share(self, unit: UnitSpec, place: int) -> slice:
        """Elements of a unit's accumulator that the replica at `place` adds up; perhaps none."""
        shares = self._layout.shares
        return slice(place * unit.numel // shares, (place + 1) * unit.numel // shares)

    def _mine(self, unit: UnitSpec) -> slice:
        """What this rank adds up: all of it where each replica adds for itself."""
        return self._share(unit, self._place if self._layout.shares > 1 else 0)

    def _read_of(self, member: int, unit: UnitSpec, share: slice, into: torch.Tensor) -> HeapRead:
        at, what = share.start * unit.accumulator_dtype.itemsize, f"the gradients of unit {unit.name!r}"
        return HeapRead(member, f"accumulator/{unit.index}", at, into.view(torch.uint8), what)

    def _accumulated(self, unit: UnitSpec) -> list[torch.Tensor]:
        """What this rank adds up, by replica."""
        layout, mine, far = self._layout, self._mine(unit), self._layout.contributors
        return [
            self._arrived(far.index(member), unit) if member in far else layout.local(member).accumulator(unit)[mine]
            for member in self._group
        ]

    def _arrived(self, number: int, unit: UnitSpec) -> torch.Tensor:
        """1-D [elements of this rank's share]: where the accumulator of the `number`-th contributor is read to."""
        layout, mine, dtype = self._layout, self._mine(unit), unit.accumulator_dtype
        start = layout.sums_at[unit.index]
        return layout.arrived(number)[start : start + (mine.stop - mine.start) * dtype.itemsize].view(dtype)
