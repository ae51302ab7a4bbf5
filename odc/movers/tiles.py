"""Applies on the CPU what odc's kernels have packed on a device: `odc.kernels.pack` has the format. It takes numba."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from odc.compiled import compiled
from odc.movers import tile_loops


def patch(shard: torch.Tensor, packed: torch.Tensor, params: Sequence[tuple[int, int, int]]) -> None:
    """Turn a shard, uint8, in place into the version whose changes since its own are `packed`, uint8. Does not wait.

    `params`: byte offset in the shard, elements and bytes of an element of each parameter of the unit.
    """
    entries, found, first = packed.numpy().view(np.uint32), shard.numpy(), 0
    for offset, numel, itemsize in params:
        word = np.uint8 if itemsize == 1 else np.uint16
        words = found[offset : offset + numel * itemsize].view(word)
        _loops().patch(words, entries, entries.view(word), first)
        first += -(-len(words) // tile_loops.TILE)


@cache
def _loops() -> Any:
    return compiled(tile_loops)
