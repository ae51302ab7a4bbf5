"""Adding pushed gradients into an owner's accumulator, at least fp32, one for each unit, guarded by one robust lock.

One turn of the lock adds up to 8 MiB, block after block in one call of torch: the GIL is asked for once a turn, and
no thread waits for the lock for more than milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from odc.protocol.layout import HeapLayout
from odc.protocol.units import Piece, UnitSpec

BLOCK_BYTES = 1 << 20  # a mixed-dtype add over 64 MB ran at 2 GB/s, over 1 MB at 14 to 21
PARALLEL_GRAIN = 32768  # elements; torch never splits a smaller op over threads
TURN_BLOCKS = 8


def accumulator_dtype(reproducible: bool) -> torch.dtype:
    """fp64 when sums must not depend on the order of arrival, else fp32: bf16 swamps over many pushes."""
    return torch.float64 if reproducible else torch.float32


def block_elements(itemsize: int) -> int:
    """Elements to add in one op.

    With several torch threads blocks stay under torch's parallel grain: a daemon or sender thread that crossed it would
    start a second team of workers and fight the training thread for cores.
    """
    return BLOCK_BYTES // itemsize if torch.get_num_threads() == 1 else PARALLEL_GRAIN


class Adder:
    """Adds into the accumulators of one root's members, upcasting; one thread at a time.

    `check` is called while a lock is held by another thread, and may raise to end that wait.
    """

    def __init__(self, layout: HeapLayout, check: Callable[[], None] = lambda: None) -> None:
        self._layout, self._check = layout, check
        self._lanes = layout.heap.lanes

    def add(self, owner: int, unit: UnitSpec, pieces: Sequence[Piece]) -> None:
        """Add all `pieces` of `unit` to the accumulator of `owner` (member index), in one turn of the lock or several.

        Raises PeerLostError if a rank died while it held the lock (the accumulator may be half-added), WaitTimeoutError
        if the lock was not had in `timeout_s` seconds.
        """
        if not pieces:
            return
        peer, mover = self._layout.holder(owner), self._layout.mover
        total, mutex = peer.accumulator(unit), peer.mutex(unit)
        turns: Iterable[tuple[list[int], list[torch.Tensor]]] = _turns(pieces, total.itemsize)
        if self._lanes.asynchronous:  # what a turn costs there is the launch and the wait for its end
            turns = [([piece.first for piece in pieces], [piece.values for piece in pieces])]
        for first, turn in turns:
            places = [total[at : at + values.numel()] for at, values in zip(first, turn, strict=True)]
            with mutex.held(self._layout.settings.timeout_s, self._check):
                mover.add(places, turn)
                self._lanes.settle()


def _turns(pieces: Sequence[Piece], itemsize: int) -> Iterator[tuple[list[int], list[torch.Tensor]]]:
    """(first elements, values) of each turn of the lock; no value longer than a block, no turn much over its size."""
    block, turn_size = block_elements(itemsize), TURN_BLOCKS * BLOCK_BYTES // itemsize
    first: list[int] = []
    turn: list[torch.Tensor] = []
    size = 0
    for piece in pieces:
        for start in range(0, piece.values.numel(), block):
            values = piece.values if piece.values.numel() <= block else piece.values[start : start + block]
            first.append(piece.first + start)
            turn.append(values)
            size += values.numel()
            if size >= turn_size:
                yield first, turn
                first, turn, size = [], [], 0
    if turn:
        yield first, turn
