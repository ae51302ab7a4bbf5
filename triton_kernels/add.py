"""add: the owner's half of a staged push, which adds the contents of a slot to the accumulator.

Plain loads and stores suffice, because only one thread of control adds at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from odc.kernels.dtypes import accumulator_dtype, kernel_dtype
from odc.kernels.rows import PAIR_COLUMNS, launch_pairs, row_of
from odc.kernels.tile import move_tile


@triton.jit(do_not_specialize=["rows_at", "rows"])
def add_kernel(rows_at: tl.tensor, rows: tl.int64, TO: tl.constexpr, FROM: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Grid: blocks of all values."""
    program = tl.program_id(0)
    row = row_of(rows_at, rows, program, PAIR_COLUMNS)
    at = (program - tl.load(row)) * BLOCK
    source = tl.load(row + 1) + at * (FROM.primitive_bitwidth // 8)
    target = tl.load(row + 2) + at * (TO.primitive_bitwidth // 8)
    move_tile(target, source, tl.load(row + 3) - at, TO, FROM, BLOCK, "add")


def add(places: Sequence[torch.Tensor], values: Sequence[torch.Tensor], *, block: int | None = None) -> None:
    """Add each of `values` to its place, in the place's dtype.

    Does not wait: the caller has seen that the values have arrived, returns the slot afterwards, and makes sure that
    nobody else adds meanwhile. One launch for each pair of dtypes, on the current stream; see `launch` for threads and
    errors.

    Args:
        places: contiguous views of an accumulator that do not overlap, fp32 or fp64; UnsupportedError for another.
        values: contiguous, as many elements each, fp64, fp32, fp16 or bf16.
        block: elements for one program.
    """
    launch_pairs(add_kernel, places, values, _types, block)


def _types(to: torch.dtype, source: torch.dtype) -> tuple[Any, Any]:
    return accumulator_dtype(to), kernel_dtype(source)
