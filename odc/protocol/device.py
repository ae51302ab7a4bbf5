"""Push and drain where accumulators and slots lie on a device: large blocks, two waits a push, one launch a drain.

Both writers of this rank's accumulators, its sender and its daemon, ask for their adds in the lane "server". The device
does them in that order, so that neither takes a lock or waits for the other. The sender waits for its gradients before
it asks for anything: what its peers have pushed is added while this rank computes. The daemon waits for no device.

Pushers that add directly, to all owners in one launch, add atomically; so do all ranks of a host to its sums for owners
on other hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from odc.deadlines import DRAIN_FIRST_SLEEP_S, DRAIN_LONGEST_SLEEP_S, Backoff
from odc.movers.choice import device_mover
from odc.movers.cuda import Values
from odc.movers.plans import Addition
from odc.protocol.layout import HeapLayout
from odc.protocol.protocol import MemberProtocol
from odc.protocol.push import Gradient, HostRoute, PushRoute
from odc.protocol.ring import Header, Inbox, Outbox
from odc.protocol.runs import Run, runs_of
from odc.protocol.units import UnitSpec, bytes_of
from odc.trace import recorder

_Key = tuple[int, int, int, torch.dtype]  # where blocks are added: unit, first element, end, and their dtype
_KEPT, _KEPT_BLOCKS = 1024, 64  # batches, and blocks of one: larger ones hardly come again


class DeviceRoute(PushRoute):
    """All owners at once, on a device. Returns from a push when the device has done it, as every route does.

    `host` goes from owner to owner, where that is all that the mover allows.
    """

    def __init__(self, protocol: MemberProtocol, host: HostRoute) -> None:
        self._protocol, self._layout, self._host = protocol, protocol.layout, host
        self._kept: dict[tuple[int, tuple[int, ...], tuple[torch.dtype, ...]], list[tuple[Run, list[Run]]]] = {}
        nodes, self._owners = protocol.grid.nodes, protocol.grid.shard_group_from_next()
        self._others = [owner for owner in self._owners if owner != nodes.me and not nodes.is_remote(owner)]
        self._remote = [owner for owner in self._owners if nodes.is_remote(owner)]
        # This node's sums for an owner on another node lie in its column's heap.
        self._adds_to = tuple(dict.fromkeys(nodes.column(owner) for owner in self._owners))

    def push(self, unit: UnitSpec, gradients: Sequence[Gradient]) -> int:
        mover, accumulate = device_mover(self._layout.mover), self._layout.settings.accumulate
        lanes, sent = self._layout.heap.lanes, 0
        lanes.settle()  # the gradients: neither lane "server" nor the holder of a lock may wait for compute
        self._protocol.await_published(self._adds_to, "push")
        atomic = self._layout.heap.adds_atomically  # known once the peers are mapped
        if accumulate == "direct" and not atomic:
            return self._host.push(unit, gradients)
        for run, blocks in self._runs_of(unit, gradients):
            mine = gradients[run.start : run.stop]
            values = Values([gradient.values for gradient in mine])
            if accumulate == "direct":
                sent += self._add_everywhere(unit, run, values, self._owners)
                continue
            sent += self._stage_everywhere(unit, run, blocks, values)
            if self._remote and atomic:
                sent += self._add_everywhere(unit, run, values, self._remote)
            else:  # under their locks, waiting for each
                sent += sum(self._host.push_to(owner, unit, mine) for owner in self._remote)
            with lanes.lane("server"):
                place = self._layout.mine.accumulator(unit)[run.first : run.first + run.numel]
                mover.add_part(values, run.numels, run.offsets, self._protocol.grid.shard, place)
                added = lanes.mark()
            lanes.follow(added)
        lanes.settle()
        self._host.announce()
        return sent

    def post_all(self) -> None:
        self._host.post_all()

    def forget(self) -> None:
        self._host.forget()

    def _runs_of(self, unit: UnitSpec, gradients: Sequence[Gradient]) -> list[tuple[Run, list[Run]]]:
        """`runs_of`, each with its blocks for slots, if there are any. They are the same for most pushes of a unit."""
        params = tuple([gradient.param for gradient in gradients])
        dtypes = tuple([gradient.values.dtype for gradient in gradients])
        runs = self._kept.get((unit.index, params, dtypes))
        if runs is None:
            made = runs_of(unit, params, dtypes)
            runs = [(run, run.blocks(self._room(run.dtype)) if self._others else []) for run in made]
            if len(self._kept) >= _KEPT:  # which parameters get gradients may change forever, as with experts
                del self._kept[next(iter(self._kept))]
            self._kept[unit.index, params, dtypes] = runs
        return runs

    def _room(self, dtype: torch.dtype) -> int:
        """Elements of a slot."""
        return self._layout.ring.slot_bytes // dtype.itemsize

    def _add_everywhere(self, unit: UnitSpec, run: Run, values: Sequence[torch.Tensor], owners: Sequence[int]) -> int:
        """Add a run to the accumulators of `owners`, atomically; returns the bytes that leave this rank."""
        layout, grid = self._layout, self._protocol.grid
        places = [
            (owner % grid.shards, layout.holder(owner).accumulator(unit)[run.first : run.first + run.numel])
            for owner in owners
        ]
        device_mover(layout.mover).accumulate_all(values, run.numels, run.offsets, places)
        return sum(owner != grid.me for owner in owners) * run.numel * run.dtype.itemsize

    def _stage_everywhere(self, unit: UnitSpec, run: Run, blocks: Sequence[Run], values: Sequence[torch.Tensor]) -> int:
        """Fill slots of every other owner with the blocks of a run, whose gradients are `values`; returns the bytes.

        The last of them are not announced yet. Waits for free slots, after it has announced the blocks before.
        """
        boxes = [self._host.box(owner) for owner in self._others]
        if not boxes:
            return 0
        room, sent = self._room(run.dtype), 0
        for block in blocks:
            if block.numel > room:
                sent += self._stage_in_parts(unit, block, values[block.start - run.start], boxes, room)
                continue
            some = values if block is run else values[block.start - run.start : block.stop - run.start]
            self._await_slots(boxes)
            slots = [(box.owner % self._protocol.grid.shards, box.slot()) for box in boxes]
            device_mover(self._layout.mover).stage(some, block.numels, block.offsets, slots)
            for box in boxes:
                box.post(unit, block.first, block.numel, block.dtype)
            sent += len(boxes) * block.numel * block.dtype.itemsize
        return sent

    def _stage_in_parts(
        self, unit: UnitSpec, block: Run, values: torch.Tensor, boxes: Sequence[Outbox], room: int
    ) -> int:
        """As `_stage_everywhere`, of one gradient of whose shard a slot holds `room` elements: as many to every owner
        before any gets more, so that all owners add at the same time.
        """
        sent, width = 0, values.itemsize
        for at in range(0, block.numel, room):
            for box in boxes:
                begin = box.owner % self._protocol.grid.shards * block.numel + at
                numel = min(room, block.numel - at, values.numel() - begin)  # the last shards may be short, or empty
                if numel > 0:
                    self._await_slots([box])
                    box.put(0, values.data_ptr() + begin * width, numel * width)
                    box.post(unit, block.first + at, numel, block.dtype)
                    sent += numel * width
        return sent

    def _await_slots(self, boxes: Sequence[Outbox]) -> None:
        """Wait until every box has a free slot."""
        for box in boxes:
            if not box.ready():
                self._layout.heap.lanes.settle()
                self._host.announce()
                self._protocol.await_credit(box.owner, box.credit)


@dataclass(frozen=True)
class _Batch:
    """Blocks that are added together: their additions and, of each source, its inbox, their unit, number and bytes."""

    additions: list[Addition]
    sources: list[tuple[Inbox, UnitSpec, int, int]]


class DeviceDrain:
    """Adds what was posted to this rank's inboxes, a batch at a time; called from the daemon's thread alone.

    One call asks the device for a batch, and a later one gives the slots back, once the device has added it: in between
    the daemon goes on, however long the device takes.
    """

    def __init__(self, layout: HeapLayout, inboxes: Sequence[Inbox], most: int) -> None:
        self._layout, self._inboxes, self._most = layout, inboxes, most
        # By the headers of their blocks, the oldest first: a unit is mostly posted as before, to one of a few slots.
        self._batches: dict[tuple[tuple[Header, ...], ...], _Batch] = {}
        self._asked: tuple[_Batch, int, object] | None = None  # with its begin, and a mark after it
        self._backoff = Backoff(DRAIN_FIRST_SLEEP_S, DRAIN_LONGEST_SLEEP_S)

    def __call__(self) -> bool:
        """Ask for at most `most` blocks of every source, or end what was asked for; True if it is to be called again.

        Sleeps for a millisecond at most, if the device is not ready.
        """
        if self._asked is None:
            self._asked = self._ask()
            self._backoff.restart()
        if self._asked is None:
            return False
        batch, begin, added = self._asked
        if not self._layout.heap.lanes.reached(added):
            self._backoff.sleep()
            return True
        for inbox, unit, count, nbytes in batch.sources:
            inbox.finish(unit, count, nbytes, begin)
        self._asked = None
        return True

    def settle(self) -> None:
        """Return once the device has done all that was asked of it here. On any thread, when no more calls come."""
        lanes = self._layout.heap.lanes
        with lanes.lane("server"):
            lanes.settle()

    def _ask(self) -> tuple[_Batch, int, object] | None:
        """Ask for what all sources have posted to be added, in one launch where blocks do not overlap."""
        found = tuple([inbox.headers(self._most) for inbox in self._inboxes])
        if not any(found):
            return None
        begin, lanes = recorder().now_on("server"), self._layout.heap.lanes
        batch = self._batches.get(found) or self._batch(found)
        with lanes.lane("server"):
            for addition in batch.additions:
                addition.run()
            return batch, begin, lanes.mark()

    def _batch(self, found: tuple[tuple[Header, ...], ...]) -> _Batch:
        """The blocks with such headers, by inbox; if they are few, kept until `_KEPT` others have come."""
        posted = [
            (inbox, *inbox.blocks(headers)) for inbox, headers in zip(self._inboxes, found, strict=True) if headers
        ]
        places: dict[_Key, list[torch.Tensor]] = {}
        for _, unit, blocks in posted:
            for block in blocks:
                key = unit.index, block.first, block.first + block.values.numel(), block.values.dtype
                places.setdefault(key, []).append(block.values)
        mover, additions = device_mover(self._layout.mover), list[Addition]()
        accumulator, units = self._layout.mine.accumulator, self._layout.units
        for turn in _turns(places):
            totals = [accumulator(units[unit])[first:end] for unit, first, end, _ in turn]
            additions.append(mover.addition(totals, [places[key] for key in turn]))
        batch = _Batch(additions, [(inbox, unit, len(blocks), bytes_of(blocks)) for inbox, unit, blocks in posted])
        if sum(map(len, found)) <= _KEPT_BLOCKS:
            if len(self._batches) == _KEPT:
                del self._batches[next(iter(self._batches))]
            self._batches[found] = batch
        return batch


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
