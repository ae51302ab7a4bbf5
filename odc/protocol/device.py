"""Push and drain where accumulators and slots lie on a device: whole chunks, one wait a push, one launch a drain.

Both writers of this rank's accumulators, its sender and its daemon, ask for their adds in the lane "server". The device
does them in that order, so that neither takes a lock or waits for the other. Pushers that add directly, to all owners
in one launch, add atomically; so do all ranks of a host to its sums for owners on other hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from odc.movers.choice import device_mover
from odc.movers.cuda import Values
from odc.protocol.layout import HeapLayout
from odc.protocol.protocol import MemberProtocol
from odc.protocol.push import Gradient, HostRoute, PushRoute
from odc.protocol.ring import Inbox
from odc.protocol.units import UnitSpec
from odc.trace import recorder


@dataclass(frozen=True)
class _Run:
    """Gradients of one dtype that lie side by side in every owner's accumulator; a block of each owner's slot.

    `start` and `stop` count gradients of the push, `numels` are elements of a shard of each, `offsets` elements from
    `first` on, `numel` elements at one owner. A gradient may be short of whole shards.
    """

    start: int
    stop: int
    first: int
    numel: int
    dtype: torch.dtype
    numels: tuple[int, ...]
    offsets: tuple[int, ...]


def _runs(unit: UnitSpec, gradients: Sequence[Gradient]) -> list[_Run]:
    """All of `gradients`, in as few runs as there can be in their order."""
    runs: list[_Run] = []
    start = 0
    for stop in range(1, len(gradients) + 1):
        specs = [unit.params[gradient.param] for gradient in gradients[start:stop]]
        dtype = gradients[start].values.dtype
        if stop < len(gradients):
            following = unit.params[gradients[stop].param].accumulator_offset
            if following == specs[-1].accumulator_offset + specs[-1].numel and gradients[stop].values.dtype == dtype:
                continue
        first, numels = specs[0].accumulator_offset, tuple(spec.numel for spec in specs)
        offsets = tuple(spec.accumulator_offset - first for spec in specs)
        runs.append(_Run(start, stop, first, sum(numels), dtype, numels, offsets))
        start = stop
    return runs


_Key = tuple[int, int, int, torch.dtype]  # where blocks are added: unit, first element, end, and their dtype


class DeviceRoute(PushRoute):
    """All owners at once, on a device. Returns from a push when the device has done it, as every route does.

    `host` goes from owner to owner, where that is all that the mover or the slots allow.
    """

    def __init__(self, protocol: MemberProtocol, host: HostRoute) -> None:
        self._protocol, self._layout, self._host = protocol, protocol.layout, host
        self._kept: dict[tuple[int, tuple[int, ...], tuple[torch.dtype, ...]], list[_Run]] = {}
        nodes, self._owners = protocol.grid.nodes, protocol.grid.shard_group_from_next()
        self._others = [owner for owner in self._owners if owner != nodes.me and not nodes.is_remote(owner)]
        self._remote = [owner for owner in self._owners if nodes.is_remote(owner)]
        # This node's sums for an owner on another node lie in its column's heap.
        self._adds_to = tuple(dict.fromkeys(nodes.column(owner) for owner in self._owners))

    def push(self, unit: UnitSpec, gradients: Sequence[Gradient]) -> int:
        mover, accumulate = device_mover(self._layout.mover), self._layout.settings.accumulate
        self._protocol.await_published(self._adds_to, "push")
        atomic = self._layout.heap.adds_atomically  # known once the peers are mapped
        if accumulate == "direct" and not atomic:
            return self._host.push(unit, gradients)
        lanes, sent = self._layout.heap.lanes, 0
        computed = lanes.mark()
        for run in self._runs_of(unit, gradients):
            mine = gradients[run.start : run.stop]
            values = Values([gradient.values for gradient in mine])
            if accumulate == "direct":
                sent += self._add_everywhere(unit, run, values, self._owners)
                continue
            sent += self._stage_everywhere(unit, mine, run, values)
            if self._remote and atomic:
                sent += self._add_everywhere(unit, run, values, self._remote)
            else:  # under their locks, waiting for each
                sent += sum(self._host.push_to(owner, unit, mine) for owner in self._remote)
            with lanes.lane("server"):
                lanes.follow(computed)
                place = self._layout.mine.accumulator(unit)[run.first : run.first + run.numel]
                mover.add_part(values, run.numels, run.offsets, self._protocol.grid.shard, place)
                added = lanes.mark()
            lanes.follow(added)
        lanes.settle()
        self._host.announce()
        return sent

    def post_all(self) -> None:
        self._host.post_all()

    def _runs_of(self, unit: UnitSpec, gradients: Sequence[Gradient]) -> list[_Run]:
        """`_runs`, which are the same for most pushes of a unit."""
        params = tuple([gradient.param for gradient in gradients])
        key = unit.index, params, tuple([gradient.values.dtype for gradient in gradients])
        runs = self._kept.get(key)
        if runs is None:
            runs = self._kept[key] = _runs(unit, gradients)
        return runs

    def _add_everywhere(self, unit: UnitSpec, run: _Run, values: Sequence[torch.Tensor], owners: Sequence[int]) -> int:
        """Add a run to the accumulators of `owners`, atomically; returns the bytes that leave this rank."""
        layout, grid = self._layout, self._protocol.grid
        places = [
            (owner % grid.shards, layout.holder(owner).accumulator(unit)[run.first : run.first + run.numel])
            for owner in owners
        ]
        device_mover(layout.mover).accumulate_all(values, run.numels, run.offsets, places)
        return sum(owner != grid.me for owner in owners) * run.numel * run.dtype.itemsize

    def _stage_everywhere(
        self, unit: UnitSpec, gradients: Sequence[Gradient], run: _Run, values: Sequence[torch.Tensor]
    ) -> int:
        """Fill a slot of every other owner with a run, which is `gradients`; returns the bytes. They are not notified
        yet. Waits for free slots, after it has notified the owners of the blocks before.
        """
        host, shards, others = self._host, self._protocol.grid.shards, self._others
        nbytes = run.numel * run.dtype.itemsize
        if nbytes > self._layout.ring.slot_bytes:  # in another dtype than the slots were made for
            return sum(host.stage(owner, unit, gradients) for owner in others)
        boxes = [host.box(owner) for owner in others]
        for box in boxes:
            if not box.ready():
                self._layout.heap.lanes.settle()
                host.announce()
                self._protocol.await_credit(box.owner, box.credit)
        if boxes:
            slots = [(box.owner % shards, box.slot()) for box in boxes]
            device_mover(self._layout.mover).stage(values, run.numels, run.offsets, slots)
        for box in boxes:
            box.post(unit, run.first, run.numel, run.dtype)
        return len(boxes) * nbytes


class DeviceDrain:
    """Adds what was posted to this rank's inboxes; called from the daemon's thread alone."""

    def __init__(self, layout: HeapLayout, inboxes: Sequence[Inbox], most: int) -> None:
        self._layout, self._inboxes, self._most = layout, inboxes, most

    def __call__(self) -> bool:
        """Add at most `most` blocks of every source, which wait for one another once; True if there were any."""
        found = [(inbox, inbox.peek(self._most)) for inbox in self._inboxes]
        batches = [(inbox, *batch) for inbox, batch in found if batch is not None]
        if not batches:
            return False
        layout, begin = self._layout, recorder().now_on("server")
        places: dict[_Key, list[torch.Tensor]] = {}
        for _, unit, blocks in batches:
            for block in blocks:
                key = unit.index, block.first, block.first + block.values.numel(), block.values.dtype
                places.setdefault(key, []).append(block.values)
        lanes = layout.heap.lanes
        with lanes.lane("server"):
            for turn in _turns(places):
                totals = [layout.mine.accumulator(layout.units[unit])[first:end] for unit, first, end, _ in turn]
                device_mover(layout.mover).add_all(totals, [places[key] for key in turn])
            lanes.settle()
        for inbox, unit, blocks in batches:
            inbox.finish(unit, blocks, begin)
        return True


def _turns(places: dict[_Key, list[torch.Tensor]]) -> list[list[_Key]]:
    """The places (unit, first, end, dtype) in groups whose members do not overlap: one add each."""
    turns: list[list[_Key]] = []
    for key in places:
        unit, first, end, _ = key
        for turn in turns:
            if not any(other == unit and start < end and first < stop for other, start, stop, _ in turn):
                turn.append(key)
                break
        else:
            turns.append([key])
    return turns
