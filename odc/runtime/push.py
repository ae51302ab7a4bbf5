"""push: send one unit's gradients to the ranks that own them.

Chose to copy straight from the gradients into the owners' staging slots, without first flattening the unit: one copy a
gradient, and no second unit-sized buffer on the pusher. Gradients travel in their own dtype; the owner upcasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from odc.errors import UnsupportedError
from odc.runtime.accumulate import Adder
from odc.runtime.layout import WIRE_DTYPES, Space
from odc.runtime.staging import Outbox
from odc.runtime.units import Piece, UnitSpec


@dataclass(frozen=True)
class Gradient:
    """One parameter's whole gradient on its way to the owners.

    Args:
        param: index in the unit.
        values: contiguous 1-D [up to shards * padded shard] in the gradient's own dtype, shard after shard.
    """

    param: int
    values: torch.Tensor


def flatten(grad: torch.Tensor, shard_dim: int, shards: int) -> torch.Tensor:
    """Lay a gradient out shard after shard, 1-D contiguous; copies only if it does not lie so already."""
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


class Pusher:
    """Pushes of one root; all calls come from one thread at a time (the sender).

    Args:
        space: the root's heaps.
        ready: returns once the owner (member) has opened the current epoch, or raises.
        await_credit: returns once the outbox has credit, or raises.
        ring_bell: wakes the owner's daemon.
    """

    def __init__(
        self,
        space: Space,
        ready: Callable[[int], None],
        await_credit: Callable[[Outbox], None],
        ring_bell: Callable[[int], None],
    ) -> None:
        self._space, self._ready, self._await_credit, self._ring_bell = space, ready, await_credit, ring_bell
        self._outboxes: dict[int, Outbox] = {}
        self._batches = space.heap.lanes.asynchronous  # an owner is told of several blocks at once
        self._adder = Adder(space, space.geometry.shard)

    def push(self, unit: UnitSpec, gradients: Sequence[Gradient]) -> int:
        """Send `gradients` of `unit` to their owners; returns the bytes that left this rank.

        Returns when the last block is posted (or added), not when it is accumulated.
        """
        return sum(self.push_to(owner, unit, gradients) for owner in self._space.geometry.row_from_next())

    def post_all(self) -> None:
        """Let the owners see every filled slot; where a push was cut short on a device, some wait to be told of."""
        for box in self._outboxes.values():
            self._tell(box)

    def push_to(self, owner: int, unit: UnitSpec, gradients: Sequence[Gradient]) -> int:
        """Send what belongs to one owner (member index); returns the bytes that left this rank."""
        me = self._space.geometry.me
        self._ready(owner)
        pieces = pieces_for(unit, gradients, owner % self._space.geometry.shards)
        if owner == me or self._space.settings.accumulate != "server":
            added = list(pieces)
            self._adder.add(owner, unit, added)
            return sum(piece.values.nbytes for piece in added) if owner != me else 0
        return self._stage(unit, owner, pieces)

    def _stage(self, unit: UnitSpec, owner: int, pieces: Iterator[Piece]) -> int:
        box = self._outboxes.get(owner)
        if box is None:
            box = self._outboxes[owner] = Outbox(self._space, owner)
        nbytes = 0
        for run in _runs(pieces):
            nbytes += self._stage_run(box, unit, run)
        if self._batches:
            self._tell(box)
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
                        self._tell(box)
                    self._await_credit(box)
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
            self._ring_bell(box.owner)

    def _tell(self, box: Outbox) -> None:
        if box.tell():
            self._ring_bell(box.owner)


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
