"""The seam between the verbs and what moves their data: torch, or the Triton kernels of `odc.kernels`.

Chose two modules with the same five functions, one of them taken when a root is built, over a class or a branch in each
verb: the verbs say when data may move, these functions only how. Everything about order, waiting and visibility stays
in the verbs. The price is that the functions' shape is the verbs': a third way to move data must fit it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Protocol, cast

import torch

from odc.errors import UnsupportedError
from odc.runtime.movers import cpu as by_torch
from odc.runtime.movers import cuda as by_cuda
from odc.settings import Settings

_CPU = torch.device("cpu")


class Moves(Protocol):
    """Functions that move data; from any thread, none waits for a peer.

    On the CPU they return when it is there; on a device when it is asked for, in the current lane (`odc.memory.Lanes`).
    """

    def publish(self, places: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> None:
        """Copy each shard to its place in the published buffer, converting."""

    def gather(
        self,
        outs: Sequence[torch.Tensor],
        offsets: Sequence[int],
        shards: int,
        owners: Iterator[tuple[int, torch.Tensor]],
    ) -> None:
        """Fill a unit's unsharded parameters.

        Args:
            outs: for each parameter 1-D contiguous [shards * padded shard].
            offsets: byte offset of each one's shard in every owner's published memory.
            shards: how many there are.
            owners: waits for each owner in turn and gives (shard, its published memory, uint8); may be used up first.
        """

    def put(self, address: int, source: int, nbytes: int) -> None:
        """Copy bytes from `source` into a peer's staging slot at `address`."""

    def add(self, places: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Add to own accumulators, converting; the caller holds their lock."""

    def accumulate(self, places: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Add to a peer's accumulators, converting; the caller holds their lock."""


def moves_of(settings: Settings, device: torch.device = _CPU) -> Moves:
    """What `settings.kernels` says, for memory on `device`.

    Raises:
        UnsupportedError: triton is not installed, or could neither compile (no GPU) nor interpret here.
    """
    if settings.kernels == "torch":
        return by_cuda if device.type == "cuda" else by_torch
    try:
        from odc.runtime.movers import triton as by_kernels
    except ModuleNotFoundError as error:
        raise UnsupportedError("Settings(kernels='triton') needs triton: pip install 'odc-fsdp[kernels]'") from error
    by_kernels.refuse_unusable(device)
    if device.type == "cuda":  # a staging slot is plain bytes: the copy engine's work
        names = ("publish", "gather", "add", "accumulate")
        return cast(Moves, SimpleNamespace(put=by_cuda.put, **{name: getattr(by_kernels, name) for name in names}))
    return by_kernels
