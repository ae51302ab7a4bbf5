"""What movers make and callers keep: how values are added, how the changes of a unit are applied, and how its sums are
rounded; for devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

Dtypes = Iterable[tuple[torch.dtype, torch.dtype, torch.dtype | None]]  # see `DeviceMover.prepare`
#: Of a unit, by parameter: where its shard is published, the version before, which may lie in the same place, and the
#: shard; then the memory for what has changed.
PackedUnit = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[torch.Tensor], torch.Tensor]


class Addition(Protocol):
    """Adds the same values to the same places, whatever they hold, again and again. It keeps their memory mapped."""

    def run(self) -> None:
        """Ask for it in the current lane; no other thread adds to these places meanwhile."""


class Patches(Protocol):
    """Applies what `DeviceMover.pack` has written. `directory_bytes`: those of the changes before the records."""

    directory_bytes: int

    def run(self, shard: torch.Tensor, packed: torch.Tensor) -> None:
        """Patch `shard` in place by `packed`, both uint8; on any thread."""


class Rounding(Protocol):
    """How the sums of a unit are rounded where they cross to another host. On a device no call waits for it."""

    def write(self, total: torch.Tensor, memory: torch.Tensor) -> None:
        """Round a sum, 1-D [numel], into `memory`, uint8 [nbytes]; on any thread."""

    def add(self, total: torch.Tensor, memory: torch.Tensor, into: torch.Tensor) -> None:
        """Write `total` plus the sum that lies in `memory`, added in fp32, to `into`, which may be `total`: [numel]."""

    def keep(self, total: torch.Tensor, memory: torch.Tensor, residual: torch.Tensor, used: Sequence[bool]) -> None:
        """Set `residual`, fp32 [numel], to what rounding took off `total`, for the parameters that are `used`: of
        others no rank reads what has crossed. Where a sum was not finite the residual stays.
        """
