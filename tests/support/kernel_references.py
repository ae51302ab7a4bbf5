"""The kernels in plain torch: what the tests hold them against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from odc.kernels import Signal
    from odc.protocol.rounding import RoundedUnit


def accumulate_reference(
    gradients: Sequence[torch.Tensor],
    shard_numels: Sequence[int],
    offsets: Sequence[int],
    accumulators: Sequence[torch.Tensor],
) -> None:
    """`odc.kernels.accumulate`; `accumulators` are the owners', 1-D."""
    for shard, total in enumerate(accumulators):
        for gradient, numel, offset in zip(gradients, shard_numels, offsets, strict=True):
            part = gradient.view(-1)[shard * numel : (shard + 1) * numel]
            total[offset : offset + part.numel()] += part.to(total.dtype)


def add_reference(places: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """`odc.kernels.add`."""
    for place, value in zip(places, values, strict=True):
        place += value.to(place.dtype)


def gather_reference(
    outs: Sequence[torch.Tensor],
    offsets: Sequence[int],
    peers: Sequence[torch.Tensor],
    *,
    dims: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """`odc.kernels.gather`; `peers` are the owners' memories, uint8 and 1-D."""
    for out, offset, dim in zip(outs, offsets, dims or [0] * len(outs), strict=True):
        own = dtype or out.dtype
        for part, peer in zip(out.chunk(len(peers), dim), peers, strict=True):
            shard = peer[offset : offset + part.numel() * own.itemsize].clone().view(own)
            part.copy_(shard.view(part.shape))


def get_reference(
    out: torch.Tensor, peers: Sequence[torch.Tensor], peer: int, offset: int = 0, *, dtype: torch.dtype | None = None
) -> None:
    """`odc.kernels.get`; `peers` are the peers' memories, uint8 and 1-D."""
    dtype = dtype or out.dtype
    nbytes = out.numel() * dtype.itemsize
    out.copy_(peers[peer][offset : offset + nbytes].clone().view(dtype).view(out.shape))


def publish_reference(places: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> None:
    """`odc.kernels.publish`."""
    for place, shard in zip(places, shards, strict=True):
        place.copy_(shard)


def put_reference(
    values: Sequence[torch.Tensor],
    peers: Sequence[torch.Tensor],
    peer: int,
    offset: int = 0,
    *,
    signal: Signal | None = None,
) -> None:
    """`odc.kernels.put`; `peers` are the peers' memories, uint8 and 1-D."""
    for value in values:
        peers[peer][offset : offset + value.nbytes] = value.view(-1).view(torch.uint8)
        offset += value.nbytes
    if signal is not None and any(value.numel() for value in values):
        peers[peer][signal.offset : signal.offset + 8].view(torch.int64).fill_(signal.value)


def params_of(unit: RoundedUnit) -> list[tuple[int, int, bool]]:
    """What `odc.kernels.RoundingPlan` takes of a unit, which is what it is held against."""
    return [(part.numel, part.at, part.coarse) for part in unit.parts]
