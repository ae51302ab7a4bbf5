"""push: send a unit's gradients to the ranks that own them, in bounded memory.

A pusher counts what a route has sent. The route on the CPU goes from owner to owner, and adds there or stages there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from odc.errors import PeerLostError, UnsupportedError
from odc.protocol.accumulate import Adder
from odc.protocol.protocol import MemberProtocol
from odc.protocol.regions import WIRE_DTYPES
from odc.protocol.ring import Outbox
from odc.protocol.units import Piece, UnitSpec
from odc.protocol.words import Word


@dataclass(frozen=True)
class Gradient:
    """One parameter's whole gradient on its way to the owners; `param` is its index in the unit.

    `values`: contiguous 1-D [up to shards * padded shard] in the gradient's own dtype, shard after shard.
    """

    param: int
    values: torch.Tensor


def flatten(grad: torch.Tensor, shard_dim: int, shards: int) -> torch.Tensor:
    """A gradient shard after shard, 1-D contiguous, without its graph; copies only where it is laid out otherwise."""
    grad = grad.detach()  # after `backward(create_graph=True)` each sum would keep the graphs of all before it
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


class PushRoute(ABC):
    """How gradients reach their owners: `push` again and again and, after one that was cut short, `post_all`. All calls
    come from one thread at a time.
    """

    @abstractmethod
    def push(self, unit: UnitSpec, gradients: Sequence[Gradient]) -> int:
        """Send `gradients` of `unit` to their owners; returns the bytes that left this rank.

        Waits for each owner to begin the current epoch, and for free slots. Returns when the last block is posted (or
        added), not when it is accumulated.
        """

    @abstractmethod
    def post_all(self) -> None:
        """Let the owners see every filled slot; where a push was cut short on a device, some wait to be shown."""

    @abstractmethod
    def forget(self) -> None:
        """Drop the views that are kept of the owners' heaps, which are closed: their memory ends with the last view. On
        any thread; a push that is not over keeps what it uses.
        """


class HostRoute(PushRoute):
    """From owner to owner, block by block; on a device only adds. `notify` wakes the daemon of a member."""

    def __init__(self, protocol: MemberProtocol, notify: Callable[[int], None]) -> None:
        self._protocol, self._layout, self._notify = protocol, protocol.layout, notify
        self._owners = protocol.grid.shard_group_from_next()
        self._boxes: dict[int, Outbox] = {}
        self._adder = Adder(self._layout, lambda: protocol.waiter.check("waiting to add to an accumulator"))

    def push(self, unit: UnitSpec, gradients: Sequence[Gradient]) -> int:
        return sum(self.push_to(owner, unit, gradients) for owner in self._owners)

    def push_to(self, owner: int, unit: UnitSpec, gradients: Sequence[Gradient]) -> int:
        """Send what belongs to one owner (member index); returns the bytes that left this rank."""
        grid, nodes = self._protocol.grid, self._protocol.grid.nodes
        remote = nodes.is_remote(owner)
        # This node's sum for an owner on another node lies in its column's heap.
        self._protocol.await_published((nodes.column(owner) if remote else owner,), "push")
        found = pieces_for(unit, gradients, owner % grid.shards)
        if owner != grid.me and not remote and self._layout.stages:
            return sum(self._stage_run(self.box(owner), unit, run) for run in _runs(found))
        pieces = list(found)
        try:
            self._adder.add(owner, unit, pieces)
        except PeerLostError:  # some rank died while it held the lock
            self._protocol.waiter.await_reason(f"pushing unit {unit.name!r}")
            raise
        return sum(piece.values.nbytes for piece in pieces) if owner != grid.me else 0

    def box(self, owner: int) -> Outbox:
        """This rank's end of the ring to an owner."""
        box = self._boxes.get(owner)
        if box is None:
            box = self._boxes[owner] = Outbox(self._layout, owner)
        return box

    def _stage_run(self, box: Outbox, unit: UnitSpec, run: list[Piece]) -> int:
        dtype = run[0].values.dtype
        room = box.ring.slot_bytes // dtype.itemsize  # elements of one slot
        first, filled, total = run[0].first, 0, 0
        for piece in run:
            taken = 0
            while taken < piece.values.numel():
                if not filled:
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
        self._notify(box.owner)

    def post_all(self) -> None:
        for box in self._boxes.values():
            if box.show():
                self._notify(box.owner)
        self.forget()  # one that was cut short may have lost a slot, which the next finds in the heap

    def forget(self) -> None:
        self._boxes = {}  # another thread may be going through those of before

    def announce(self) -> None:
        """Notify every owner of what was posted to it, which has settled."""
        for box in self._boxes.values():
            if box.announce():
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


class Pusher:
    """Pushes of one root over a `route`; all calls come from one thread at a time (the sender).

    Attributes:
        counts: int64 [parameters], how often this rank has pushed each since the start.
        epoch: the newest epoch in which it pushed anything.
    """

    def __init__(self, protocol: MemberProtocol, notify: Callable[[int], None], route: PushRoute | None = None) -> None:
        self._protocol, self._layout, self._notify = protocol, protocol.layout, notify
        self.route = route or HostRoute(protocol, notify)
        self.counts = torch.zeros(self._layout.param_base[-1], dtype=torch.int64, device="cpu")
        self._counted = self.counts.numpy()  # the same numbers; one of them is counted in a tenth of torch's time
        self.epoch = 0
        self._ended: tuple[int, set[int]] = (0, set())  # epoch, and units of which this rank has stored LAST in it

    def push(self, unit: UnitSpec, gradients: Sequence[Gradient]) -> int:
        """As `PushRoute.push`; a push that is complete is counted."""
        sent, counted = self.route.push(unit, gradients), self._counted
        start, end = self._layout.param_base[unit.index : unit.index + 2]
        if len(gradients) == end - start:  # a parameter has one gradient
            counted[start:end] += 1
        else:
            for gradient in gradients:
                counted[start + gradient.param] += 1
        self.epoch = self._protocol.epoch
        self._protocol.count(Word.PUSHED, sent)
        return sent

    def end(self, units: Iterable[UnitSpec]) -> None:
        """LAST: this rank pushes no more of `units` in this epoch, so that their sums may leave the host; where no sums
        do, nothing. A later push is not lost, but the sum crosses again.
        """
        protocol, bases = self._protocol, self._layout.param_base
        if not self._layout.spans_hosts:
            return
        if self._ended[0] != protocol.epoch:
            self._ended = protocol.epoch, set()
        ended = self._ended[1]
        counts = {
            unit.index: int(self._counted[bases[unit.index] : bases[unit.index + 1]].sum())
            for unit in units
            if unit.numel and unit.index not in ended
        }
        ended.update(counts)
        if counts and protocol.say_last(counts):
            for member in protocol.grid.local:
                self._notify(member)
