"""Data moved by torch and memmove: the default (see `odc.runtime.movers.moves`).

Chose memmove for what is copied as it is, over torch's copy: it costs a fraction for small parameters, and as much for
large ones.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import torch


def publish(places: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> None:
    """See `Moves.publish`."""
    torch._foreach_copy_(list(places), list(shards))


def gather(
    outs: Sequence[torch.Tensor], offsets: Sequence[int], shards: int, owners: Iterator[tuple[int, torch.Tensor]]
) -> None:
    """See `Moves.gather`; copies from each owner as soon as it can be read."""
    copies = [(out.data_ptr(), offset, out.nbytes // shards) for out, offset in zip(outs, offsets, strict=True)]
    memmove = ctypes.memmove
    for shard, source in owners:  # `source` is held: the memory stays mapped while it is copied
        base = source.data_ptr()
        for place, offset, nbytes in copies:
            memmove(place + shard * nbytes, base + offset, nbytes)


def put(address: int, source: int, nbytes: int) -> None:
    """See `Moves.put`."""
    ctypes.memmove(address, source, nbytes)


def add(places: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """See `Moves.add`."""
    torch._foreach_add_(list(places), list(values))


accumulate = add
