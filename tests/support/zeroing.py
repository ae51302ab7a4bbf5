"""A kernel of one program for `zero_tile` alone; imported where kernels are interpreted."""

from __future__ import annotations

import triton
import triton.language as tl

from odc.kernels.tile import zero_tile


@triton.jit
def zeroing(target: tl.tensor, start: tl.tensor, end: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Zero floats at address `target` as `zero_tile` does, with `start` and `end` from int64 [1]."""
    zero_tile(target, tl.load(start), tl.load(end), tl.float32, BLOCK)
