"""Push and drain where accumulators and slots lie on a device: whole chunks, one wait a push, one launch a drain.

Both writers of this rank's accumulators, its sender and its daemon, ask for their adds in the lane "server". The device
does them in that order, so that neither takes a lock or waits for the other. Pushers that add directly, to all owners
in one launch, add atomically.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from odc.runtime.layout import HeapLayout
from odc.runtime.movers.choice import device_mover
from odc.runtime.push import Gradient, Inbox, Pusher, pieces_for
from odc.runtime.units import UnitSpec
from odc.trace import PUSH, recorder


@dataclass
class _Run:
    """Gradients of one dtype that lie side by side in every owner's accumulator; a block of each owner's slot.

    `offsets` are elements from `first` on; a gradient may be short of whole shards.
    """

    first: int
    dtype: torch.dtype
    numel: int = 0  # elements at one owner
    values: list[torch.Tensor] = field(default_factory=list)
    numels: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)


def _runs(unit: UnitSpec, gradients: Sequence[Gradient]) -> Iterator[_Run]:
    """All of `gradients`, as few runs as there can be in their order."""
    run: _Run | None = None
    for gradient in gradients:
        spec, values = unit.params[gradient.param], gradient.values
        if run is None or run.first + run.numel != spec.accumulator_offset or run.dtype != values.dtype:
            if run is not None:
                yield run
            run = _Run(spec.accumulator_offset, values.dtype)
        run.values.append(values)
        run.numels.append(spec.numel)
        run.offsets.append(run.numel)
        run.numel += spec.numel
    if run is not None:
        yield run


_Key = tuple[int, int, int, torch.dtype]  # where blocks are added: unit, first element, end, and their dtype


class DevicePusher(Pusher):
    """A `Pusher` on a device. Returns from a push when the device has done it, as every pusher does."""

    def push(self, unit: UnitSpec, gradients: Sequence[Gradient]) -> int:
        mover, accumulate = device_mover(self._layout.mover), self._layout.settings.accumulate
        if accumulate == "per_source" or (accumulate == "direct" and not mover.atomic):
            return super().push(unit, gradients)
        self._protocol.await_published(self._owners, "push")
        lanes, sent = self._layout.heap.lanes, 0
        computed = lanes.mark()
        for run in _runs(unit, gradients):
            if accumulate == "direct":
                sent += self._add_everywhere(unit, run)
                continue
            sent += self._stage_everywhere(unit, gradients, run)
            with lanes.lane("server"):
                lanes.follow(computed)
                self._add_here(unit, run)
                added = lanes.mark()
            lanes.follow(added)
        lanes.settle()
        self._announce()
        return self._pushed(unit, gradients, sent)

    def _add_everywhere(self, unit: UnitSpec, run: _Run) -> int:
        """Add a run to all accumulators, this rank's too, atomically; returns the bytes that leave this rank."""
        layout, shards = self._layout, self._protocol.grid.shards
        places = [(owner % shards, layout.peer(owner).accumulator(unit)) for owner in self._owners]
        offsets = [run.first + offset for offset in run.offsets]
        device_mover(layout.mover).accumulate_all(run.values, run.numels, offsets, places)
        return (len(places) - 1) * run.numel * run.dtype.itemsize

    def _add_here(self, unit: UnitSpec, run: _Run) -> None:
        """Add this rank's part of a run to its own accumulator."""
        shard, total = self._protocol.grid.shard, self._layout.mine.accumulator(unit)
        places, parts = [], []
        for values, numel, offset in zip(run.values, run.numels, run.offsets, strict=True):
            part = values[shard * numel : (shard + 1) * numel]
            if part.numel():
                parts.append(part)
                places.append(total[run.first + offset : run.first + offset + part.numel()])
        if parts:
            self._layout.mover.add(places, parts)

    def _stage_everywhere(self, unit: UnitSpec, gradients: Sequence[Gradient], run: _Run) -> int:
        """Fill a slot of every other owner with a run; returns the bytes. They are not told yet.

        Waits for free slots, after it has told the owners of the blocks before.
        """
        grid = self._protocol.grid
        others = [owner for owner in self._owners if owner != grid.me]
        nbytes = run.numel * run.dtype.itemsize
        if nbytes > self._layout.ring.slot_bytes:  # in another dtype than the slots were made for
            params = {id(values) for values in run.values}
            mine = [gradient for gradient in gradients if id(gradient.values) in params]
            return sum(self._stage(unit, owner, pieces_for(unit, mine, owner % grid.shards)) for owner in others)
        boxes = [self._outbox(owner) for owner in others]
        for box in boxes:
            if box.credit() <= 0:
                self._layout.heap.lanes.settle()
                self._announce()
                self._protocol.await_credit(box.owner, box.credit)
        if boxes:
            slots = [(box.owner % grid.shards, box.slot()) for box in boxes]
            device_mover(self._layout.mover).stage(run.values, run.numels, run.offsets, slots)
        for box in boxes:
            box.post(unit, run.first, run.numel, run.dtype)
        return len(boxes) * nbytes

    def _announce(self) -> None:
        """Tell every owner of what was posted to it and has settled."""
        for box in self._outboxes.values():
            if box.announce():
                self._notify(box.owner)


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
        layout, begin = self._layout, recorder().now()
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
            inbox.take(len(blocks))
            source = layout.grid.ranks[inbox.source]
            nbytes = sum(block.values.nbytes for block in blocks)
            recorder().add(PUSH, begin, unit=unit.name, peer=source, nbytes=nbytes, lane="server")
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
