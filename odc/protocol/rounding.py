"""How a host's sum of one unit is rounded where it crosses to another host, and what is left of it here.

With `sums_dtype="int8"` each parameter crosses by itself, in the 8-bit blocks of `odc.movers.int8` if it is coarse, and
else in bf16; on a device kernels do it, which a mover makes of the same `parts`. With "bfloat16" the whole sum crosses
in bf16.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from odc.memory import round_up
from odc.movers import int8

_ALIGN = 16  # bytes


@dataclass(frozen=True)
class SumPart:
    """Elements [first, first + numel) of a unit's accumulator, which lie `at` bytes in the rounded sum."""

    first: int
    numel: int
    at: int
    coarse: bool

    @property
    def nbytes(self) -> int:
        return int8.room_for(self.numel) if self.coarse else 2 * self.numel

    def of(self, total: torch.Tensor) -> torch.Tensor:
        """1-D [numel]: this part of a sum."""
        return total[self.first : self.first + self.numel]

    def rounded(self, memory: torch.Tensor) -> torch.Tensor:
        """This part of a rounded sum: uint8 [nbytes] if it is coarse, else bf16 [numel]."""
        found = memory[self.at : self.at + self.nbytes]
        return found if self.coarse else found.view(torch.bfloat16)

    def write(self, total: torch.Tensor, memory: torch.Tensor) -> None:
        if self.coarse:
            int8.pack(self.of(total), self.rounded(memory))
        else:
            self.rounded(memory).copy_(self.of(total))

    def add(self, total: torch.Tensor, memory: torch.Tensor, into: torch.Tensor) -> None:
        if self.coarse:
            int8.add(self.of(total), self.rounded(memory), self.of(into))
        else:
            torch.add(self.of(total), self.rounded(memory), out=self.of(into))

    def keep(self, total: torch.Tensor, memory: torch.Tensor, residual: torch.Tensor) -> None:
        out = self.of(residual)
        if self.coarse:
            int8.rest(self.of(total), self.rounded(memory), out)
        else:
            left = self.of(total) - self.rounded(memory)
            out.copy_(torch.where(left.isfinite(), left, out))


class RoundedUnit:
    """A `Rounding` by torch and by loops: the rounded sums of one unit, each in `nbytes` bytes of memory.

    `params`: for each parameter its elements in the accumulator, one after the other, and whether it is coarse.
    """

    def __init__(self, params: Sequence[tuple[int, bool]]) -> None:
        self.parts = list[SumPart]()
        self.numel = self.nbytes = 0
        for numel, coarse in params:
            part = SumPart(self.numel, numel, self.nbytes, coarse)
            self.parts.append(part)
            self.numel += numel
            self.nbytes += round_up(part.nbytes, _ALIGN)

    def write(self, total: torch.Tensor, memory: torch.Tensor) -> None:
        """See `Rounding.write`."""
        for part in self.parts:
            part.write(total, memory)

    def add(self, total: torch.Tensor, memory: torch.Tensor, into: torch.Tensor) -> None:
        """See `Rounding.add`."""
        for part in self.parts:
            part.add(total, memory, into)

    def keep(self, total: torch.Tensor, memory: torch.Tensor, residual: torch.Tensor, used: Sequence[bool]) -> None:
        """See `Rounding.keep`."""
        for part in itertools.compress(self.parts, used):
            part.keep(total, memory, residual)


def coarse_parameters(found: Sequence[tuple[Sequence[int], bool]]) -> list[bool]:
    """For each parameter of a model, given as its shape and whether an `nn.Embedding` holds it, whether it is coarse.

    Matrices are, and what has more dimensions, but for those of embeddings and those with as many rows as the largest
    embedding, which makes them the head.
    """
    vocabulary = max((shape[0] for shape, embeds in found if embeds), default=0)
    return [len(shape) > 1 and not embeds and shape[0] != vocabulary for shape, embeds in found]
