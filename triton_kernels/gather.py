"""gather: a whole unit from all its owners' memories, straight to its unsharded parameters, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from odc.kernels.dtypes import kernel_dtype
from odc.kernels.get import copy_types, pull, refuse_conversion
from odc.kernels.launch import block_of, ceil_div, check_table, contiguous, launch
from odc.kernels.nvshmem import Symmetric, options_for
from odc.kernels.rows import row_of, row_table

# first program, byte offset at the owner, target, elements of a line, blocks of a line, bytes from line to line of the
# target, bytes from shard to shard of the target
_COLUMNS = tl.constexpr(7)


@triton.jit(do_not_specialize=["rows_at", "rows", "table", "first", "shards", "own", "pes"])
def gather_kernel(
    rows_at: tl.tensor,
    rows: tl.int64,
    table: tl.tensor,
    first: tl.int32,
    shards: tl.int32,
    own: tl.int64,
    pes: tl.tensor,
    TO: tl.constexpr,
    FROM: tl.constexpr,
    BLOCK: tl.constexpr,
    NVSHMEM: tl.constexpr,
) -> None:
    """Grid: blocks of one shard of all parameters, owners."""
    shard = ((tl.program_id(1) + first) % shards).to(tl.int64)
    program = tl.program_id(0)
    row = row_of(rows_at, rows, program, _COLUMNS)
    block = program - tl.load(row).to(tl.int32)
    n = tl.load(row + 3)
    blocks = tl.load(row + 4).to(tl.int32)  # divided in 32 bits: in 64 it is a call
    line = (block // blocks).to(tl.int64)
    at = (block % blocks).to(tl.int64) * BLOCK
    offset = tl.load(row + 1) + line * n * (FROM.primitive_bitwidth // 8)
    target = tl.load(row + 2) + line * tl.load(row + 5) + shard * tl.load(row + 6)
    pull(target, table, shard, own, pes, offset, at, n, TO, FROM, BLOCK, NVSHMEM)


def gather(
    outs: Sequence[torch.Tensor],
    offsets: Sequence[int],
    table: torch.Tensor,
    *,
    dims: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    first: int = 0,
    symmetric: Symmetric | None = None,
    block: int | None = None,
) -> None:
    """Fill the unsharded parameters `outs` from their owners' memories.

    Does not wait: the caller has seen that every owner has published. One launch, on the current stream; see
    `launch` for threads and errors.

    Args:
        outs: contiguous; along its sharded dimension each holds equal shards (padded ones, where FSDP2 pads).
        offsets: of each parameter's shard in every owner's memory, in bytes; there it lies contiguously.
        table: int64 [shards] on the device of `outs`: address of each owner's memory, 0 where no pointer reaches it.
        dims: sharded dimension of each, 0 by default.
        dtype: of the owners' elements, where `outs` (of one dtype then) are to be converted; else bytes are copied.
        first: owner to begin with; ranks that all fetch at once begin with different ones.
        symmetric: how to reach owners without a pointer; they cannot convert.
        block: elements for one program.

    Raises ValueError if a parameter does not divide into as many shards as `table` has entries.
    """
    if not outs:
        return
    device = check_table(table)
    contiguous("unsharded parameter", outs, device)
    refuse_conversion(dtype, outs, symmetric)
    to, source = copy_types(dtype, outs)
    lines = [_lines(out, dim, table.numel()) for out, dim in zip(outs, dims or [0] * len(outs), strict=True)]
    words = [n * (out.dtype.itemsize // to.itemsize) for (_, n), out in zip(lines, outs, strict=True)]
    size = block or block_of(gather_kernel, max(to.itemsize, source.itemsize), max(words))
    blocks = [ceil_div(n, size) for n in words]
    columns = [
        (offset, out.data_ptr(), n, each, n * to.itemsize * table.numel(), n * to.itemsize)
        for out, offset, n, each in zip(outs, offsets, words, blocks, strict=True)
    ]
    programs = [count * each for (count, _), each in zip(lines, blocks, strict=True)]
    args, constants = options_for(table, symmetric)
    launch(
        gather_kernel,
        (sum(programs), table.numel()),
        device,
        *(*row_table(programs, columns, device), table, first, table.numel(), *args),
        TO=kernel_dtype(to),
        FROM=kernel_dtype(source),
        BLOCK=size,
        **constants,
    )


def _lines(out: torch.Tensor, dim: int, shards: int) -> tuple[int, int]:
    """(lines, elements of a line) of one shard: along `dim` a shard is contiguous within a line of the parameter."""
    if out.dim() <= dim or out.shape[dim] % shards:
        raise ValueError(f"a parameter of shape {tuple(out.shape)} does not divide into {shards} shards along {dim}")
    lines = out.shape[:dim].numel() if dim else 1
    return lines, out.numel() // (lines * shards) if lines else 0
