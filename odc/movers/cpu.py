"""Data moved on the CPU by torch and memmove: the default.

Bytes that need no conversion are copied by memmove, which costs a fraction of torch's copy for small parameters and as
much for large ones.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch


def publish(places: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> None:
    """See `DataMover.publish`."""
    torch._foreach_copy_(list(places), list(shards))


def zero(totals: Sequence[torch.Tensor]) -> None:
    """See `DataMover.zero`."""
    for total in totals:
        total.zero_()


def gather(
    outs: Sequence[torch.Tensor], offsets: Sequence[int], shards: int, sources: Sequence[tuple[int, torch.Tensor]]
) -> None:
    """See `DataMover.gather`."""
    copies = [(out.data_ptr(), offset, out.nbytes // shards) for out, offset in zip(outs, offsets, strict=True)]
    memmove = ctypes.memmove
    for shard, memory in sources:  # `memory` is held: it stays mapped while it is copied
        base = memory.data_ptr()
        for place, offset, nbytes in copies:
            memmove(place + shard * nbytes, base + offset, nbytes)


def put(address: int, source: int, nbytes: int) -> None:
    """See `DataMover.put`."""
    ctypes.memmove(address, source, nbytes)


def add(places: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """See `DataMover.add`."""
    torch._foreach_add_(list(places), list(values))
