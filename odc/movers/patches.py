"""What movers of devices take and give of a unit's changes, which kernels pack and apply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

#: Of a unit, by parameter: where its shard is published, the version before, which may lie in the same place, and the
#: shard; then the memory for what has changed.
PackedUnit = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[torch.Tensor], torch.Tensor]


class Patches(Protocol):
    """Applies what `DeviceMover.pack` has written. `directory_bytes`: those of the changes before the records."""

    directory_bytes: int

    def run(self, shard: torch.Tensor, packed: torch.Tensor) -> None:
        """Patch `shard` in place by `packed`, both uint8; on any thread."""
