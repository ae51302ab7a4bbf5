"""How a push is cut for an owner's staging slots: into runs of gradients, and runs into blocks. Arithmetic alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from odc.protocol.units import UnitSpec


@dataclass(frozen=True)
class Run:
    """Gradients of one dtype that lie side by side in every owner's accumulator.

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

    def blocks(self, room: int) -> list[Run]:
        """This run in as few parts as there can be of at most `room` elements at an owner, each of whole gradients.

        A gradient whose shard alone has more than `room` elements is a part of its own.
        """
        if self.numel <= room:
            return [self]
        parts: list[Run] = []
        begin = numel = 0
        for end in range(1, len(self.numels) + 1):
            numel += self.numels[end - 1]
            if end < len(self.numels) and numel + self.numels[end] <= room:
                continue
            at, numels = self.offsets[begin], self.numels[begin:end]
            offsets = tuple(offset - at for offset in self.offsets[begin:end])
            parts.append(Run(self.start + begin, self.start + end, self.first + at, numel, self.dtype, numels, offsets))
            begin, numel = end, 0
        return parts


def runs_of(unit: UnitSpec, params: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[Run]:
    """Gradients of `params`, indices in the unit, in as few runs as there can be in their order."""
    specs, runs = [unit.params[param] for param in params], list[Run]()
    start = 0
    for stop in range(1, len(specs) + 1):
        if stop < len(specs):
            end = specs[stop - 1].accumulator_offset + specs[stop - 1].numel
            if specs[stop].accumulator_offset == end and dtypes[stop] == dtypes[start]:
                continue
        some = specs[start:stop]
        first, numels = some[0].accumulator_offset, tuple(spec.numel for spec in some)
        offsets = tuple(spec.accumulator_offset - first for spec in some)
        runs.append(Run(start, stop, first, sum(numels), dtypes[start], numels, offsets))
        start = stop
    return runs
