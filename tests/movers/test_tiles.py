"""What kernels have packed on a device, applied on the CPU: the published bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import change_tiles

from odc.movers import tiles

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8]
SIZES = [0, 1, 7, 8, 9, 255, 256, 257, 2047, 2048, 2049]


@st.composite
def units(draw: st.DrawFn) -> tuple[list[torch.dtype], list[int], int, float, float]:
    """Dtypes and elements of each parameter, a seed, the share of words that change, and of those the ones by one."""
    dtypes = draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=4))
    numels = [draw(st.one_of(st.sampled_from(SIZES), st.integers(0, 5000))) for _ in dtypes]
    return dtypes, numels, draw(st.integers(0, 1 << 20)), draw(st.sampled_from([0.001, 0.1, 1])), draw(st.floats(0, 1))


@given(units())
def test_a_patched_shard_is_the_new_one_bit_for_bit(
    unit: tuple[list[torch.dtype], list[int], int, float, float],
) -> None:
    dtypes, numels, seed, share, near = unit
    draw, offsets, nbytes = torch.Generator().manual_seed(seed), list[int](), 0
    for dtype, numel in zip(dtypes, numels, strict=True):
        offsets.append(nbytes)
        nbytes += -(-numel * dtype.itemsize // 16) * 16
    old = torch.randint(0, 256, (nbytes,), generator=draw, dtype=torch.uint8)
    new, pairs, params = old.clone(), [], []
    for offset, numel, dtype in zip(offsets, numels, dtypes, strict=True):
        was, now = (one[offset : offset + numel * dtype.itemsize] for one in (old, new))
        words = now.view(torch.int8 if dtype.itemsize == 1 else torch.int16)
        which, some = torch.rand(len(words), generator=draw) < share, torch.rand(len(words), generator=draw) < near
        steps = torch.where(some, 2 * torch.randint(0, 2, (len(words),), generator=draw) - 1, 77)
        words += torch.where(which, steps, 0).to(words.dtype)  # over the ends of their range, too
        pairs.append((was.view(dtype), now.view(dtype)))
        params.append((offset, numel, dtype.itemsize))
    packed = change_tiles.pack(pairs)
    assert bool(packed.numel()) == (not torch.equal(old, new))
    if packed.numel():
        tiles.patch(old, packed, params)
    assert torch.equal(old, new)


@pytest.mark.parametrize("rate", [1e-6, 1e-4, 1e-2])
def test_what_an_optimizer_step_changes(rate: float) -> None:
    draw = torch.Generator().manual_seed(0)
    weights = torch.randn(100_000, generator=draw) * 0.02
    weights[:100:7], weights[1:100:7], weights[2:100:7] = torch.nan, torch.inf, -0.0
    old, new = (one.bfloat16() for one in (weights, weights - rate * torch.randn(100_000, generator=draw)))
    shard = old.view(torch.uint8).clone()
    tiles.patch(shard, change_tiles.pack([(old, new)]), [(0, len(old), 2)])
    assert torch.equal(shard, new.view(torch.uint8))
