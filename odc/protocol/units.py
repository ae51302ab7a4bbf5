"""What is published and accumulated together: the layout of one unit (one `fully_shard`ed module).

A unit has one contiguous region on each rank, its parameters side by side in module order, padded to equal shards as
FSDP2 pads them, so a block of a push may span parameters. Frozen parameters have no place in the accumulator.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from odc.memory import round_up

_ALIGN = 16  # bytes; every parameter's place in the published shard can be viewed in its own dtype


@dataclass(frozen=True)
class ParamSpec:
    """One parameter's shard: `numel` elements, padded, the same on every rank, published in compute dtype `dtype`.

    `published_offset` is in bytes in the unit's published region, `accumulator_offset` in elements in its accumulator,
    where only what is `trained` has a place: no other gradient may be pushed. `coarse`: its sums cross to other hosts
    as int8. `own_dtype` is the shard's, where it is known; what ranks read is all of `dtype`.
    """

    name: str
    numel: int
    dtype: torch.dtype
    published_offset: int
    accumulator_offset: int
    trained: bool = True
    coarse: bool = False
    own_dtype: torch.dtype | None = None

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        kind, dtype = "trained" if self.trained else "frozen", str(self.dtype).removeprefix("torch.")
        crossing = ", int8 between hosts" if self.coarse else ""
        return f"{self.name} ({self.numel} elements a rank, {dtype}, {kind}{crossing})"


@dataclass(frozen=True)
class UnitSpec:
    """One unit: `published_bytes` in a rank's published region, `numel` elements in its accumulator.

    `pushed_bytes` are the most that one push of it brings to an owner: its trained parameters in compute dtype.
    """

    index: int
    name: str
    params: tuple[ParamSpec, ...]
    published_bytes: int
    numel: int
    accumulator_dtype: torch.dtype
    pushed_bytes: int

    @classmethod
    def build(
        cls,
        index: int,
        name: str,
        params: Sequence[tuple[str, int, torch.dtype]],
        accumulator_dtype: torch.dtype,
        frozen: Collection[str] = (),
        coarse: Collection[str] = (),
        own: Mapping[str, torch.dtype] | None = None,
    ) -> UnitSpec:
        """Lay out `params`, given as (name, elements of a padded shard, compute dtype); `frozen` and `coarse` are names
        of them, and `own` the dtypes of their shards.
        """
        specs: list[ParamSpec] = []
        at_byte = at_element = pushed = 0
        for param, numel, dtype in params:
            kinds = param not in frozen, param in coarse, (own or {}).get(param)
            spec = ParamSpec(param, numel, dtype, at_byte, at_element, *kinds)
            specs.append(spec)
            room = round_up(spec.nbytes, _ALIGN)
            at_byte += room
            at_element += numel if spec.trained else 0
            pushed += room if spec.trained else 0
        return cls(index, name, tuple(specs), at_byte, at_element, accumulator_dtype, pushed)

    @property
    def accumulator_bytes(self) -> int:
        return self.numel * self.accumulator_dtype.itemsize

    def fingerprint(self) -> str:
        """Everything on which two ranks must agree, as text."""
        return f"{self.name}[{';'.join(self.lines())}]"

    def lines(self) -> list[str]:
        """The fingerprint without the name: each parameter, then the accumulator's dtype."""
        return [*map(str, self.params), f"sums in {str(self.accumulator_dtype).removeprefix('torch.')}"]


class Piece(NamedTuple):
    """`values` (1-D, any wire dtype) belong at elements [first, first + len) of one owner's accumulator of a unit."""

    first: int
    values: torch.Tensor


def bytes_of(pieces: Sequence[Piece]) -> int:
    """Bytes of all their values."""
    return sum([piece.values.nbytes for piece in pieces])
