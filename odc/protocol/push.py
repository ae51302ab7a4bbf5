"""push: send a unit's gradients to the ranks that own them, through staging rings in bounded memory.

Each pair of ranks has a ring of its own with one pusher and one reader, so there is no lock and a slow owner holds up
only what is pushed to it. Blocks are added in the order in which they were posted, but the slot that was given back
last is filled next: an owner that keeps up leaves its blocks in the cache. A block's header therefore names its slot.
"""

from __future__ import annotations

import functools
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from odc.errors import PeerLostError, UnsupportedError
from odc.protocol.accumulate import Adder
from odc.protocol.layout import HEADER_WORDS, WIRE_DTYPES, HeapLayout
from odc.protocol.protocol import MemberProtocol
from odc.protocol.ring import RingWords
from odc.protocol.units import Piece, UnitSpec
from odc.protocol.words import Word

_WIRE_CODES = {dtype: code for code, dtype in enumerate(WIRE_DTYPES)}
_SLOT = 4  # word of a header
_HEADER = struct.Struct(f"={HEADER_WORDS}q")


@dataclass(frozen=True)
class Gradient:
    """One parameter's whole gradient on its way to the owners; `param` is its index in the unit.

    `values`: contiguous 1-D [up to shards * padded shard] in the gradient's own dtype, shard after shard.
    """

    param: int
    values: torch.Tensor


def flatten(grad: torch.Tensor, shard_dim: int, shards: int) -> torch.Tensor:
    """A gradient shard after shard, 1-D contiguous; copies only where it is laid out otherwise."""
    if shard_dim:
        grad = torch.cat(torch.chunk(grad, shards, dim=shard_dim), dim=0)
    grad = grad.contiguous().view(-1)
    if grad.dtype not in WIRE_DTYPES:
        raise UnsupportedError(f"gradients of dtype {grad.dtype} cannot be pushed; use fp32, bf16, fp16 or fp64")
    return grad


def pieces_for(unit: UnitSpec, gradients: Sequence[Gradient], shard: int) -> Iterator[Piece]:
    """What of `gradients` belongs to `shard`, in accumulator order; padding is left out."""
    for gradient in gradients:
        spec = unit.params[gradient.param]
        start = shard * spec.numel
        values = gradient.values[start : start + spec.numel]
        if values.numel():
            yield Piece(spec.accumulator_offset, values)


class Outbox:
    """The pusher's end of the ring to one owner, another member than this one; used by one thread at a time."""

    def __init__(self, protocol: MemberProtocol, owner: int) -> None:
        layout, grid, peer = protocol.layout, protocol.grid, protocol.layout.local(owner)
        distance = grid.distance(grid.me, owner)
        self.owner, self.ring = owner, layout.ring
        self._put, self._lanes = layout.mover.put, layout.heap.lanes
        self._data = peer.staging_address(distance)
        self._ring_bytes: Callable[[], torch.Tensor] = functools.partial(peer.staging, distance)
        self._slots: dict[int, torch.Tensor] = {}
        self._headers = peer.headers(distance).view(-1, HEADER_WORDS).numpy()
        self._raw_headers = self._headers.data.cast("B")
        self._words = protocol.ring(owner, grid.me)
        self.posted, self._returned = self._words.posted(), self._words.added()
        self._shown = self.posted
        slots = self.ring.slots
        # Slots of the blocks on their way, in the order of posting; the free ones, the next to fill last.
        self._away = deque(int(self._headers[i % slots, _SLOT]) for i in range(self._returned, self.posted))
        self._free = [slot for slot in reversed(range(slots)) if slot not in self._away]

    def ready(self) -> bool:
        """Whether there is a free slot."""
        return bool(self._free) or self.credit() > 0

    def credit(self) -> int:
        """Free slots, with all that the owner has given back."""
        returned = self._words.added()  # acquire: the owner has read what the slots held
        for _ in range(returned - self._returned):
            self._free.append(self._away.popleft())
        self._returned = returned
        return len(self._free)

    def put(self, at_byte: int, address: int, nbytes: int) -> None:
        """Copy `nbytes` from `address` into the slot to be posted next, at `at_byte`. `credit()` must be above 0."""
        self._put(self._data + self._free[-1] * self.ring.slot_bytes + at_byte, address, nbytes)

    def slot(self) -> torch.Tensor:
        """uint8: the slot to be posted next. `credit()` must be above 0."""
        number, size = self._free[-1], self.ring.slot_bytes
        if number not in self._slots:
            self._slots[number] = self._ring_bytes()[number * size : (number + 1) * size]
        return self._slots[number]

    def post(self, unit: UnitSpec, first: int, numel: int, dtype: torch.dtype) -> None:
        """Hand the filled slot over: elements [first, first + numel) of `unit`. On a device `show` makes it visible."""
        slot = self._free.pop()
        self._away.append(slot)
        at = self.posted % self.ring.slots * _HEADER.size
        _HEADER.pack_into(self._raw_headers, at, unit.index, first, numel, _WIRE_CODES[dtype], slot)
        self.posted += 1
        if not self._lanes.asynchronous:
            self.show()

    def show(self) -> bool:
        """Let the owner see all that was posted; whether that was news. On the CPU every post does it.

        On a device it waits for the copies into the slots, so several posts share one wait.
        """
        if self._shown == self.posted:
            return False
        self._lanes.settle()
        return self.announce()

    def announce(self) -> bool:
        """As `show`, of copies that have settled."""
        if self._shown == self.posted:
            return False
        self._words.post(self.posted)  # release: data and header are visible before the head moves
        self._shown = self.posted
        return True


class Inbox:
    """The owner's end of the ring from one source, another member than this one; used by the daemon alone."""

    def __init__(self, layout: HeapLayout, source: int) -> None:
        grid, mine = layout.grid, layout.mine
        distance = grid.distance(source, grid.me)
        self.source, self._units, self._slots = source, layout.units, layout.ring.slots
        data = mine.staging(distance).view(-1, layout.ring.slot_bytes)
        self._data = [data.view(dtype) for dtype in WIRE_DTYPES]
        self._headers = mine.headers(distance).view(-1, HEADER_WORDS).numpy()
        self._words = RingWords(layout, grid.me, source)
        self._taken = self._words.added()

    def waiting(self) -> int:
        """Posted blocks that are not yet taken: slots in use."""
        return self._words.posted() - self._taken

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
        """Give the slots of the `count` oldest blocks back to their pusher, after their values were added."""
        self._taken += count
        self._words.give_back(self._taken)  # release: the sum is visible before the credit returns


class Pusher:
    """Pushes of one root; all calls come from one thread at a time (the sender).

    Attributes:
        counts: int64 [parameters], how often this rank has pushed each since the start.
        epoch: the newest epoch in which it pushed anything.
    """

    def __init__(self, protocol: MemberProtocol, notify: Callable[[int], None]) -> None:
        self._protocol, self._layout, self._notify = protocol, protocol.layout, notify
        self._owners = protocol.grid.shard_group_from_next()
        self._outboxes: dict[int, Outbox] = {}
        self._batches = self._layout.heap.lanes.asynchronous  # an owner is notified of several blocks at once
        self._adder = Adder(self._layout)
        self.counts = torch.zeros(self._layout.param_base[-1], dtype=torch.int64)
        self._counted = self.counts.numpy()  # the same numbers; one of them is counted in a tenth of torch's time
        self.epoch = 0
        self._ended: tuple[int, set[int]] = (0, set())  # epoch, and units of which this rank has said LAST in it

    def push(self, unit: UnitSpec, gradients: Sequence[Gradient]) -> int:
        """Send `gradients` of `unit` to their owners; returns the bytes that left this rank.

        Waits for each owner to begin the current epoch, and for free slots. Returns when the last block is posted (or
        added), not when it is accumulated.
        """
        return self._pushed(unit, gradients, sum(self.push_to(owner, unit, gradients) for owner in self._owners))

    def end(self, units: Iterable[UnitSpec]) -> None:
        """Say that this rank pushes no more of `units` in this epoch, so that their sums may leave the host; where no
        sums do, nothing. A later push is not lost, but the sum crosses again.
        """
        protocol, bases = self._protocol, self._layout.param_base
        if not self._layout.spans_hosts:
            return
        if self._ended[0] != protocol.epoch:
            self._ended = protocol.epoch, set()
        said = self._ended[1]
        counts = {
            unit.index: int(self._counted[bases[unit.index] : bases[unit.index + 1]].sum())
            for unit in units
            if unit.numel and unit.index not in said
        }
        said.update(counts)
        if counts and protocol.say_last(counts):
            for member in protocol.grid.local:
                self._notify(member)

    def _pushed(self, unit: UnitSpec, gradients: Sequence[Gradient], sent: int) -> int:
        """Count a push that is complete; returns `sent`, its bytes."""
        counted = self._counted
        start, end = self._layout.param_base[unit.index : unit.index + 2]
        if len(gradients) == end - start:  # a parameter has one gradient
            counted[start:end] += 1
        else:
            for gradient in gradients:
                counted[start + gradient.param] += 1
        self.epoch = self._protocol.epoch
        self._protocol.count(Word.PUSHED, sent)
        return sent

    def push_to(self, owner: int, unit: UnitSpec, gradients: Sequence[Gradient]) -> int:
        """Send what belongs to one owner (member index); returns the bytes that left this rank."""
        grid, nodes = self._protocol.grid, self._protocol.grid.nodes
        remote = nodes.is_remote(owner)
        # This node's sum for an owner on another node lies in its column's heap.
        self._protocol.await_published((nodes.column(owner) if remote else owner,), "push")
        pieces = pieces_for(unit, gradients, owner % grid.shards)
        if owner == grid.me or remote or not self._layout.stages:
            added = list(pieces)
            try:
                self._adder.add(owner, unit, added)
            except PeerLostError:  # some rank died while it held the lock
                self._protocol.waiter.await_reason(f"pushing unit {unit.name!r}")
                raise
            return sum(piece.values.nbytes for piece in added) if owner != grid.me else 0
        return self._stage(unit, owner, pieces)

    def post_all(self) -> None:
        """Let the owners see every filled slot; where a push was cut short on a device, some wait to be shown."""
        for box in self._outboxes.values():
            self._show(box)

    def _outbox(self, owner: int) -> Outbox:
        box = self._outboxes.get(owner)
        if box is None:
            box = self._outboxes[owner] = Outbox(self._protocol, owner)
        return box

    def _stage(self, unit: UnitSpec, owner: int, pieces: Iterator[Piece]) -> int:
        box, nbytes = self._outbox(owner), 0
        for run in _runs(pieces):
            nbytes += self._stage_run(box, unit, run)
        if self._batches:
            self._show(box)
        return nbytes

    def _stage_run(self, box: Outbox, unit: UnitSpec, run: list[Piece]) -> int:
        dtype = run[0].values.dtype
        room = box.ring.slot_bytes // dtype.itemsize  # elements of one slot
        first, filled, total = run[0].first, 0, 0
        for piece in run:
            taken = 0
            while taken < piece.values.numel():
                if not filled:
                    if self._batches and box.credit() <= 0:
                        self._show(box)
                    self._protocol.await_credit(box.owner, box.credit)
                count = min(room - filled, piece.values.numel() - taken)
                source = piece.values.data_ptr() + taken * dtype.itemsize
                box.put(filled * dtype.itemsize, source, count * dtype.itemsize)
                filled, taken, total = filled + count, taken + count, total + count
                if filled == room:
                    self._post(box, unit, first, filled, dtype)
                    first, filled = first + filled, 0
        if filled:
            self._post(box, unit, first, filled, dtype)
        return total * dtype.itemsize

    def _post(self, box: Outbox, unit: UnitSpec, first: int, numel: int, dtype: torch.dtype) -> None:
        box.post(unit, first, numel, dtype)
        if not self._batches:
            self._notify(box.owner)

    def _show(self, box: Outbox) -> None:
        if box.show():
            self._notify(box.owner)


def _runs(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Group pieces that follow each other without a gap and share a dtype: one block may hold several parameters."""
    run: list[Piece] = []
    for piece in pieces:
        if run:
            last = run[-1]
            follows = last.first + last.values.numel() == piece.first and last.values.dtype == piece.values.dtype
            if not follows:
                yield run
                run = []
        run.append(piece)
    if run:
        yield run
