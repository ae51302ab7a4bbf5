"""publish: this rank's shards, converted to compute dtype, side by side in the buffer that peers read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from odc.kernels.rows import PAIR_COLUMNS, launch_pairs, row_of
from odc.kernels.tile import move_tile


@triton.jit(do_not_specialize=["rows_at", "rows"])
def publish_kernel(
    rows_at: tl.tensor, rows: tl.int64, TO: tl.constexpr, FROM: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Grid: blocks of all parameters."""
    program = tl.program_id(0)
    row = row_of(rows_at, rows, program, PAIR_COLUMNS)
    at = (program - tl.load(row)) * BLOCK
    source = tl.load(row + 1) + at * (FROM.primitive_bitwidth // 8)
    target = tl.load(row + 2) + at * (TO.primitive_bitwidth // 8)
    move_tile(target, source, tl.load(row + 3) - at, TO, FROM, BLOCK, "copy")


def publish(places: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], *, block: int | None = None) -> None:
    """Copy each shard to its place, converting.

    Does not wait: the caller has seen that no peer still reads the places, and announces afterwards that they can be
    read. One launch for each pair of dtypes, on the current stream; see `launch` for threads and errors.

    Args:
        places: contiguous views of the published buffer, in compute dtype.
        shards: contiguous, of any dtype, as many elements as their places.
        block: elements for one program.
    """
    launch_pairs(publish_kernel, places, shards, block)
