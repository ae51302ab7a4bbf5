"""What is published and accumulated together: the layout of one unit (one `fully_shard`ed module).

Chose one contiguous region a unit and rank, parameters side by side in module order, padded to equal shards as FSDP2
pads them: a whole unit is one address and a block of a push may span parameters. The padding costs at most one row of
each parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_ALIGN = 16  # bytes; every parameter's place in the published shard can be viewed in its own dtype


@dataclass(frozen=True)
class ParamSpec:
    """One parameter's shard.

    Args:
        name: fully qualified name.
        numel: elements of a padded shard, the same on every rank.
        dtype: compute dtype, in which it is published.
        published_offset: byte offset in the unit's published region.
        accumulator_offset: element offset in the unit's accumulator.
    """

    name: str
    numel: int
    dtype: torch.dtype
    published_offset: int
    accumulator_offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the published shard."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class UnitSpec:
    """One unit: `published_bytes` in a rank's published region, `numel` elements in its accumulator."""

    index: int
    name: str
    params: tuple[ParamSpec, ...]
    published_bytes: int
    numel: int
    accumulator_dtype: torch.dtype

    @classmethod
    def build(
        cls,
        index: int,
        name: str,
        params: Sequence[tuple[str, int, torch.dtype]],
        accumulator_dtype: torch.dtype,
    ) -> UnitSpec:
        """Lay out `params`, given as (name, elements of a padded shard, compute dtype)."""
        specs: list[ParamSpec] = []
        at_byte = at_element = 0
        for param, numel, dtype in params:
            specs.append(ParamSpec(param, numel, dtype, at_byte, at_element))
            at_byte += -(-numel * dtype.itemsize // _ALIGN) * _ALIGN
            at_element += numel
        return cls(index, name, tuple(specs), at_byte, at_element, accumulator_dtype)

    @property
    def accumulator_bytes(self) -> int:
        """Bytes of one accumulator."""
        return self.numel * self.accumulator_dtype.itemsize

    def fingerprint(self) -> str:
        """All that two ranks must agree on, as text."""
        params = ";".join(f"{p.name}:{p.numel}:{p.dtype}" for p in self.params)
        return f"{self.name}[{params}]{self.accumulator_dtype}"


@dataclass(frozen=True, slots=True)
class Piece:
    """`values` (1-D, any wire dtype) belong at elements [first, first + len) of one owner's accumulator of a unit."""

    first: int
    values: torch.Tensor
