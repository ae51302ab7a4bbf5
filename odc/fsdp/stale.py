"""Refusing weights that were changed inside an open minibatch.

Chose to compare the own shards byte for byte with what was published, before each root forward of an open minibatch,
over watching tensor versions: versions miss in-place optimizer writes and `.data` (measured). It costs one read of the
own shard (P / ranks) a microbatch; `Settings(stale_check=False)` saves it. Without it, a changed weight would give
wrong output in silence: the own part new, the peers' parts old.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache

import torch

from odc.errors import StaleParametersError
from odc.runtime import Space


@cache
def _memcmp() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None).memcmp  # several times as fast as torch.equal, and a NaN equals itself
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    return function


def _same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Of two contiguous tensors of one dtype and size."""
    return _memcmp()(left.data_ptr(), right.data_ptr(), left.nbytes) == 0


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _any_differ(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether any two differ in a byte, on their device; waits for it once."""
    found = [(a.view(_WORDS[a.itemsize]) != b.view(_WORDS[b.itemsize])).any() for a, b in pairs if a.numel()]
    return bool(torch.stack(found).any()) if found else False


@torch.no_grad()
def refuse_stale(space: Space, epoch: int, shards: Sequence[Sequence[torch.Tensor]]) -> None:
    """Raise `StaleParametersError`, naming the parameter, if an own shard is no longer what peers fetch.

    On a device it waits for the current stream once.

    Args:
        shards: own padded shards by unit and parameter, 1-D.
    """
    me = space.geometry.me
    if space.heap.lanes.asynchronous:
        pairs = [
            (space.published(me, unit, i, epoch), shard.to(unit.params[i].dtype))
            for unit, tensors in zip(space.units, shards, strict=True)
            for i, shard in enumerate(tensors)
        ]
        if not _any_differ(pairs):
            return
    for unit, tensors in zip(space.units, shards, strict=True):
        for i, (spec, shard) in enumerate(zip(unit.params, tensors, strict=True)):
            if not _same_bytes(space.published(me, unit, i, epoch).cpu(), shard.to(spec.dtype).cpu()):
                raise StaleParametersError(
                    f"rank {space.geometry.ranks[me]} (epoch {epoch}): {spec.name} changed inside an open minibatch, "
                    "after it was published; peers would still see the old values. Call model.publish() on every rank "
                    "after changing weights (EMA swap, manual edit), or change them between minibatches"
                )
