"""Sums in 8 bits: blocks of 128 elements with a scale each, in CPU memory.

    4 bytes a block     the scale, fp32: the largest magnitude of the block over 127
    1 byte an element   the value over the scale, rounded to the nearest of -127 to 127

A value comes back as its code times its scale, at most half a scale away. A block that holds infinity or NaN has a
scale of NaN, and comes back as NaN; one whose scale would be subnormal comes back as zeros. Loops compiled by numba do
the work where it is installed, torch elsewhere: the same bits, at several times the processor time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch

from odc.compiled import compiled, numba
from odc.memory import round_up
from odc.movers import int8_loops
from odc.movers.int8_loops import BLOCK

_ALIGN = 16  # bytes
_TURN = 4096 * BLOCK  # elements that torch takes at a time: what it makes in between stays in the cache


def prepare() -> None:
    """Compile the loops, or load what was compiled before, where numba is installed; the first use takes seconds
    otherwise.
    """
    if numba() is not None:
        _loops()


def room_for(numel: int) -> int:
    """Bytes of so many packed elements."""
    return round_up(4 * -(-numel // BLOCK) + numel, _ALIGN)


def pack(values: torch.Tensor, into: torch.Tensor) -> None:
    """Write `values`, float32 [n], to `into`, uint8 [room_for(n)], which begins on 4 bytes."""
    scales, codes = _split(into, values.numel())
    if numba() is not None:
        whole = values.numpy()
        found = scales.numpy()
        _loops().pack(whole.view(np.uint32), whole, found.view(np.uint32), found, codes.numpy())
        return
    for block_values, block_scales, block_codes in _blocks(scales, codes, values):
        top = block_values.abs().amax(1)  # NaN, if any is
        scale = top / float(int8_loops.LEVELS)
        scale[scale < float(int8_loops.TINY)] = 0.0
        block_scales.copy_(torch.where(top.isfinite(), scale, torch.nan))
        inverse = torch.where(block_scales > 0, 1.0 / block_scales, 0.0).unsqueeze(1)
        block_codes.copy_((block_values * inverse).round_().nan_to_num_(nan=0.0))


def add(values: torch.Tensor, packed: torch.Tensor, into: torch.Tensor) -> None:
    """Fill `into`, float32 [n], with `values`, float32 [n], plus what `packed`, uint8 [room_for(n)], holds; `into`
    may be `values`. By numba in one pass, and without other memory.
    """
    scales, codes = _split(packed, values.numel())
    if numba() is not None:
        _loops().add(values.numpy(), scales.numpy(), codes.numpy(), into.numpy())
        return
    both = zip(_blocks(scales, codes, values), _blocks(scales, codes, into), strict=True)
    for (block_values, block_scales, block_codes), (out, _, _) in both:
        torch.add(block_values, block_codes * block_scales.unsqueeze(1), out=out)


def rest(values: torch.Tensor, packed: torch.Tensor, into: torch.Tensor) -> None:
    """Fill `into`, float32 [n], with what packing has left out of `values`. Where that is not finite, as in a
    block whose scale is NaN, it stays as it is.
    """
    scales, codes = _split(packed, values.numel())
    if numba() is not None:
        _loops().rest(values.numpy(), scales.numpy(), codes.numpy(), into.numpy())
        return
    both = zip(_blocks(scales, codes, values), _blocks(scales, codes, into), strict=True)
    for (block_values, block_scales, block_codes), (out, _, _) in both:
        scale = block_scales.unsqueeze(1)
        left = block_values - block_codes * scale
        out.copy_(torch.where(left.isfinite(), left, out))


def _split(packed: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales, float32 [blocks], and codes, int8 [numel]: views of `packed`."""
    codes_at = 4 * -(-numel // BLOCK)
    return packed[:codes_at].view(torch.float32), packed[codes_at : codes_at + numel].view(torch.int8)


def _blocks(
    scales: torch.Tensor, codes: torch.Tensor, values: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Values [blocks, elements of a block], scales [blocks] and codes of some blocks after the other: views."""
    numel = values.numel()
    whole = numel // BLOCK * BLOCK
    starts = sorted({*range(0, whole, _TURN), whole, numel})
    for first, end in itertools.pairwise(starts):
        width = min(BLOCK, end - first)
        some = slice(first // BLOCK, -(-end // BLOCK))
        yield values[first:end].view(-1, width), scales[some], codes[first:end].view(-1, width)


@cache
def _loops() -> Any:
    loops = compiled(int8_loops)
    values, scales, codes = np.zeros(1, np.float32), np.zeros(1, np.float32), np.zeros(1, np.int8)
    loops.pack(values.view(np.uint32), values, scales.view(np.uint32), scales, codes)
    loops.add(values, scales, codes, values)
    loops.rest(values, scales, codes, values)
    return loops
