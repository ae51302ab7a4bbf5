"""Hybrid sharding: what the replicas of a shard accumulated is added up in one order, so that all hold the same bits.

    two replicas    wait: COMPLETE | read the other's accumulators | add
    N > 2           wait: COMPLETE | read the others' N-ths | add this rank's N-th up | REDUCED
                    wait: REDUCED | read the sums of the others' N-ths

The second way moves 2 (N-1)/N of an accumulator in place of N-1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from odc.hosts.node import RemoteHeaps, node_parts
from odc.protocol.layout import HeapLayout
from odc.protocol.protocol import MemberProtocol
from odc.protocol.units import UnitSpec


def gather_replicas(protocol: MemberProtocol, heaps: RemoteHeaps, used: Sequence[bool]) -> None:
    """Bring what replicas hold of this rank's gradients here, of the units that are `used`.

    Their accumulators are COMPLETE. Where each replica sums an N-th, it waits until the others have.
    """
    layout, grid = protocol.layout, protocol.grid
    units = [unit for unit in layout.units if used[unit.index] and unit.numel]
    _read_accumulators(layout, heaps, units)
    if layout.shares == 1:
        return
    for unit in units:
        first, *others = _accumulated(layout, unit)
        total = first.clone()
        for part in others:
            total.add_(part)
        layout.mine.accumulator(unit)[_own_share(layout, unit)] = total  # which no other rank reads before REDUCED
    layout.heap.lanes.settle()
    protocol.end_reducing()
    group = grid.replica_group
    place = group.index(grid.me)
    for member in group[place + 1 :] + group[:place]:
        protocol.await_reduced(member)  # it has read its N-th of this rank's accumulators, so there is room for the sum
        for unit in units:
            share = _share(unit, group.index(member), layout.shares)
            into = layout.mine.accumulator(unit)[share].view(torch.uint8)
            at = share.start * unit.accumulator_dtype.itemsize
            heaps.read(member, f"accumulator/{unit.index}", at, into, f"the gradients of unit {unit.name!r}")


def parts(layout: HeapLayout, unit: UnitSpec) -> list[torch.Tensor]:
    """What adds up to this rank's shard of the gradient of `unit`, each 1-D [unit.numel], in the order in which to add.

    Accumulators of replicas come by replica, sums of nodes by node, whichever rank adds them. Parts from other hosts
    are those that were gathered.
    """
    if layout.grid.nodes.shards_span_hosts:
        return node_parts(layout, unit)
    return _accumulated(layout, unit) if layout.shares == 1 else [layout.mine.accumulator(unit)]


def _share(unit: UnitSpec, place: int, shares: int) -> slice:
    """Elements of a unit's accumulator that the replica at `place` adds up; perhaps none."""
    return slice(place * unit.numel // shares, (place + 1) * unit.numel // shares)


def _own_share(layout: HeapLayout, unit: UnitSpec) -> slice:
    """What this rank adds up: all of it where each replica adds for itself."""
    place = layout.grid.replica_group.index(layout.grid.me) if layout.shares > 1 else 0
    return _share(unit, place, layout.shares)


def _read_accumulators(layout: HeapLayout, heaps: RemoteHeaps, units: Sequence[UnitSpec]) -> None:
    """Read what this rank adds up of the accumulators of replicas on other hosts."""
    steps_to = layout.grid.steps_to
    for number, member in sorted(enumerate(layout.contributors), key=lambda one: steps_to(one[1])):
        for unit in units:
            at = _own_share(layout, unit).start * unit.accumulator_dtype.itemsize
            into, what = _arrived(layout, number, unit).view(torch.uint8), f"the gradients of unit {unit.name!r}"
            heaps.read(member, f"accumulator/{unit.index}", at, into, what)


def _accumulated(layout: HeapLayout, unit: UnitSpec) -> list[torch.Tensor]:
    """What this rank adds up, 1-D, by replica."""
    mine, far = _own_share(layout, unit), layout.contributors
    return [
        _arrived(layout, far.index(member), unit) if member in far else layout.local(member).accumulator(unit)[mine]
        for member in layout.grid.replica_group
    ]


def _arrived(layout: HeapLayout, number: int, unit: UnitSpec) -> torch.Tensor:
    """1-D [elements of this rank's share]: where the accumulator of the `number`-th contributor is read to."""
    mine, start = _own_share(layout, unit), layout.sums_at[unit.index]
    numel = mine.stop - mine.start
    return layout.arrived(number)[start : start + numel * unit.accumulator_dtype.itemsize].view(unit.accumulator_dtype)
