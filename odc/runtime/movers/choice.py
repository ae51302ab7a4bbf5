"""The choice among the movers, modules of the same five functions: torch and memmove, torch and CUDA's driver, Triton.

The callers decide when data may move; order, waiting and visibility are their concern.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Protocol, cast

import torch

from odc.errors import UnsupportedError, install
from odc.runtime.movers import cpu, cuda
from odc.settings import Settings

_CPU = torch.device("cpu")


class DataMover(Protocol):
    """Functions that move data; from any thread, none waits for a peer.

    On the CPU they return when it is done; on a device when it is asked for, in the current lane (`odc.memory.Lanes`).
    """

    def publish(self, places: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> None:
        """Copy each shard to its place in the published buffer, converting."""

    def gather(
        self,
        outs: Sequence[torch.Tensor],
        offsets: Sequence[int],
        shards: int,
        sources: Sequence[tuple[int, torch.Tensor]],
    ) -> None:
        """Fill a unit's unsharded parameters.

        Args:
            outs: for each parameter 1-D contiguous [shards * padded shard].
            offsets: byte offset of each one's shard in every owner's published memory.
            shards: how many there are.
            sources: (shard, its owner's published memory, uint8), in the order in which to read them.
        """

    def put(self, address: int, source: int, nbytes: int) -> None:
        """Copy bytes from `source` into a peer's staging slot at `address`."""

    def add(self, places: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Add to this rank's accumulators, converting; the caller holds their lock."""

    def accumulate(self, places: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Add to a peer's accumulators, converting; the caller holds their lock."""


def mover_for(settings: Settings, device: torch.device = _CPU) -> DataMover:
    """The mover that `settings.kernels` asks for, for memory on `device`.

    Raises UnsupportedError if triton is not installed, or could neither compile (no GPU) nor interpret here.
    """
    if settings.kernels == "torch":
        return cuda if device.type == "cuda" else cpu
    try:
        from odc.runtime.movers import triton
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"Settings(kernels='triton') needs triton: {install('kernels')}") from error
    triton.refuse_unusable(device)
    if device.type == "cuda":  # a staging slot is plain bytes: the copy engine's work
        names = ("publish", "gather", "add", "accumulate")
        return cast(DataMover, SimpleNamespace(put=cuda.put, **{name: getattr(triton, name) for name in names}))
    return triton
