"""A kept state among another number of ranks: each reads its part from the slots of those that had it before.

Only slots whose rows a rank needs are read: of two or three ranks mostly, over the network where no process of the
host holds them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from odc.errors import ConfigError
from odc.recovery.members import needed_ranks, rows_of
from odc.recovery.slots import Slots
from odc.recovery.state import Division


class FormerLayout:
    """The state after `step` as `before` ranks kept it, for the `rank`-th of `world`. Used by its main thread.

    `find` gives the slots of one of the ranks before, which are whole for `step` and belong to this object from then
    on unless `find` keeps them; it may wait for another host.
    """

    def __init__(self, find: Callable[[int], Slots], step: int, before: int, rank: int, world: int) -> None:
        self._find, self._step, self._before, self._rank, self._world = find, step, before, rank, world
        self._slots: dict[int, Slots] = {}
        self._kept: dict[int, tuple[list[torch.Tensor], bytes]] = {}

    def kept(self, rank: int) -> tuple[list[torch.Tensor], bytes]:
        """What one of the ranks before has kept, as `Slots.read` gives it."""
        if rank not in self._kept:
            self._slots[rank] = self._find(rank)
            self._kept[rank] = self._slots[rank].read(self._step)
        return self._kept[rank]

    def part(self, number: int, cut: Division) -> torch.Tensor:
        """This rank's rows of a tensor that all ranks before have kept with the same number; else ConfigError."""
        begin, end = rows_of(cut.rows, self._world, self._rank)
        pieces = []
        for one in needed_ranks(cut.rows, self._world, self._rank, self._before):
            first, last = rows_of(cut.rows, self._before, one)
            piece = self._tensor(one, number)
            if piece.dim() <= cut.dim or piece.shape[cut.dim] != last - first:
                raise ConfigError(
                    f"tensor {number} of the kept state has shape {list(piece.shape)} on rank {one} of {self._before}, "
                    f"which is no part of {cut.rows} rows in dimension {cut.dim}"
                )
            low, high = max(begin, first), min(end, last)
            pieces.append(piece.narrow(cut.dim, low - first, high - low))
        if not pieces:  # more ranks than rows
            return self._tensor(0, number).narrow(cut.dim, 0, 0)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, cut.dim)

    def _tensor(self, rank: int, number: int) -> torch.Tensor:
        return self.kept(rank)[0][number]
