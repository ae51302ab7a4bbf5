"""The seam between the verbs and what moves their data: torch, or the Triton kernels of `odc.kernels`.

Chose two modules with the same five functions, one of them taken when a root is built, over a class or a branch in each
verb: the verbs say when data may move, these functions only how. Everything about order, waiting and visibility stays
in the verbs. The price is that the functions' shape is the verbs': a third way to move data must fit it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from odc.comm import by_torch
from odc.errors import UnsupportedError
from odc.settings import Settings


class Moves(Protocol):
    """Functions that move data now and return when it is there; from any thread, none waits for a peer."""

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


def moves_of(settings: Settings) -> Moves:
    """What `settings.kernels` says.

    Raises:
        UnsupportedError: triton is not installed, or could neither compile (no GPU) nor interpret here.
    """
    if settings.kernels == "torch":
        return by_torch
    try:
        from odc.comm import by_kernels
    except ModuleNotFoundError as error:
        raise UnsupportedError("Settings(kernels='triton') needs triton: pip install 'odc-fsdp[kernels]'") from error
    by_kernels.refuse_unusable()
    return by_kernels
