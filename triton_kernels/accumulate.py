"""accumulate: add gradients to the accumulators of the ranks that own them, by relaxed atomic adds of the pusher.

The last bits depend on the order of arrival, and a GPU's fp32 atomic add flushes subnormal numbers to zero. Peers need
a pointer: for others `put` into a slot, and the owner calls `add`. The adds order nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from odc.kernels.dtypes import accumulator_dtype, kernel_dtype
from odc.kernels.launch import block_of, ceil_div, check_table, contiguous, launch
from odc.kernels.rows import row_of, row_table
from odc.kernels.tile import move_tile

_COLUMNS = tl.constexpr(5)  # first program, source, elements, elements of a shard, accumulator's byte offset


@triton.jit(do_not_specialize=["rows_at", "rows", "table", "first", "shards"])
def accumulate_kernel(
    rows_at: tl.tensor,
    rows: tl.int64,
    table: tl.tensor,
    first: tl.int32,
    shards: tl.int32,
    TO: tl.constexpr,
    FROM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid: blocks of all shards' pieces, owners."""
    owner = ((tl.program_id(1) + first) % shards).to(tl.int64)
    program = tl.program_id(0)
    row = row_of(rows_at, rows, program, _COLUMNS)
    at = (program - tl.load(row)) * BLOCK
    shard = tl.load(row + 3)
    begin = owner * shard
    n = tl.minimum(shard, tl.load(row + 2) - begin) - at
    if n > 0:
        source = tl.load(row + 1) + (begin + at) * (FROM.primitive_bitwidth // 8)
        target = tl.load(table + owner) + tl.load(row + 4) + at * (TO.primitive_bitwidth // 8)
        move_tile(target, source, n, TO, FROM, BLOCK, "atomic")


def accumulate(
    gradients: Sequence[torch.Tensor],
    shard_numels: Sequence[int],
    offsets: Sequence[int],
    table: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    first: int = 0,
    block: int | None = None,
) -> None:
    """Add every owner's part of `gradients` to its accumulator: a whole unit to all owners in one launch.

    Does not wait: the caller has made sure that the owners have zeroed their accumulators. One launch for each dtype of
    gradients, on the current stream; see `launch` for threads and errors.

    Args:
        gradients: contiguous, fp64, fp32, fp16 or bf16, each laid out shard after shard; the last shards may be short
            or empty.
        shard_numels: elements of a shard of each.
        offsets: of each, in elements of the owner's accumulator.
        table: int64 [shards]: address of each owner's accumulator; one entry pushes to one owner.
        dtype: of the accumulators, fp32 or fp64; UnsupportedError for another.
        first: owner to begin with; ranks that all push at once begin with different ones.
        block: elements for one program.
    """
    to, device = accumulator_dtype(dtype), check_table(table)
    contiguous("gradient", gradients, device)
    for source in dict.fromkeys(gradient.dtype for gradient in gradients):
        mine = [i for i, gradient in enumerate(gradients) if gradient.dtype == source]
        largest = max(min(shard_numels[i], gradients[i].numel()) for i in mine)
        size = block or block_of(accumulate_kernel, max(dtype.itemsize, source.itemsize), largest)
        programs = [ceil_div(min(shard_numels[i], gradients[i].numel()), size) for i in mine]
        columns = [
            (gradients[i].data_ptr(), gradients[i].numel(), shard_numels[i], offsets[i] * dtype.itemsize) for i in mine
        ]
        launch(
            accumulate_kernel,
            (sum(programs), table.numel()),
            device,
            *(*row_table(programs, columns, device), table, first, table.numel()),
            TO=to,
            FROM=kernel_dtype(source),
            BLOCK=size,
        )
