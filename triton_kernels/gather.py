"""gather: a whole unit from all its owners' memories, straight to its unsharded parameters, in one launch.

It runs beside compute, so a few programs take block after block. The blocks of all owners at one place of the unit
follow each other: at any time every link is in use.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from odc.kernels.dtypes import kernel_dtype
from odc.kernels.get import copy_types, pull, refuse_conversion
from odc.kernels.launch import BESIDE_COMPUTE, PreparedLaunch, block_of, ceil_div, check_table, contiguous, prepared
from odc.kernels.nvshmem import Symmetric, options_for
from odc.kernels.rows import Rows, row_of, row_table
from odc.kernels.tables import passing_table

# first block, byte offset at the owner, number of the target, elements of a line, blocks of a line, bytes from line to
# line of the target, bytes from shard to shard of the target
_COLUMNS = tl.constexpr(7)


@triton.jit(
    do_not_specialize=["rows_at", "rows", "blocks", "targets", "table", "first", "count", "shards", "own", "pes"]
)
def gather_kernel(
    rows_at: tl.tensor,
    rows: tl.int64,
    blocks: tl.int32,
    targets: tl.tensor,
    table: tl.tensor,
    first: tl.int32,
    count: tl.int32,
    shards: tl.int32,
    own: tl.int64,
    pes: tl.tensor,
    TO: tl.constexpr,
    FROM: tl.constexpr,
    BLOCK: tl.constexpr,
    NVSHMEM: tl.constexpr,
) -> None:
    """Grid: any number of programs. `blocks` of one shard of all parameters; `count` shards from `first` on."""
    item = tl.program_id(0)
    while item < blocks * count:
        shard = ((item % count + first) % shards).to(tl.int64)
        program = item // count
        row = row_of(rows_at, rows, program, _COLUMNS)
        block = program - tl.load(row).to(tl.int32)
        n = tl.load(row + 3)
        line_blocks = tl.load(row + 4).to(tl.int32)  # divided in 32 bits: in 64 it is a call
        line = (block // line_blocks).to(tl.int64)
        at = (block % line_blocks).to(tl.int64) * BLOCK
        offset = tl.load(row + 1) + line * n * (FROM.primitive_bitwidth // 8)
        target = tl.load(targets + tl.load(row + 2)) + line * tl.load(row + 5) + shard * tl.load(row + 6)
        pull(target, table, shard, own, pes, offset, at, n, TO, FROM, BLOCK, NVSHMEM)
        item += tl.num_programs(0)


class GatherPlan:
    """What stays the same from gather to gather of a unit, on the device: which block of which parameter lies where.

    Arguments as of `gather`; of `outs` only shapes and dtypes count. A plan that is kept has
    `fixed_rows` make its table. Raises as `gather` does.
    """

    def __init__(
        self,
        outs: Sequence[torch.Tensor],
        offsets: Sequence[int],
        shards: int,
        device: torch.device,
        *,
        dims: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        block: int | None = None,
        make_rows: Rows = row_table,
    ) -> None:
        to, source = copy_types(dtype, outs)
        lines = [_lines(out, dim, shards) for out, dim in zip(outs, dims or [0] * len(outs), strict=True)]
        words = [n * (out.dtype.itemsize // to.itemsize) for (_, n), out in zip(lines, outs, strict=True)]
        size = block or block_of(gather_kernel, max(to.itemsize, source.itemsize), max(words))
        each = [ceil_div(n, size) for n in words]
        columns = [
            (offset, i, n, count, n * to.itemsize * shards, n * to.itemsize)
            for i, (offset, n, count) in enumerate(zip(offsets, words, each, strict=True))
        ]
        counts = [count * blocks for (count, _), blocks in zip(lines, each, strict=True)]
        self.device, self._shards, self._blocks = device, shards, sum(counts)
        self._rows = make_rows(counts, columns, device)
        self._constants = {"TO": kernel_dtype(to), "FROM": kernel_dtype(source), "BLOCK": size}
        self._launches: dict[bool, PreparedLaunch] = {}  # by whether a kernel of NVSHMEM's is used

    def run(
        self,
        targets: Sequence[int],
        table: torch.Tensor,
        first: int,
        count: int,
        *,
        symmetric: Symmetric | None = None,
        programs: int | None = None,
        warps: int | None = None,
    ) -> None:
        """Launch: fill the parameters at the addresses `targets` from `count` shards, beginning with shard `first`.

        `programs` at most run at once, by default as many as run beside compute.
        """
        args, constants = options_for(table, symmetric)
        run = self._launches.get(symmetric is None)
        if run is None:
            make = prepared if symmetric is None else PreparedLaunch  # a library among the constants makes them no key
            run = make(gather_kernel, self.device, **self._constants, **constants)
            self._launches[symmetric is None] = run
        run(
            min(self._blocks * count, programs or BESIDE_COMPUTE),
            *(*self._rows, self._blocks, passing_table(targets, self.device), table, first, count, self._shards, *args),
            warps=warps,
        )


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
    programs: int | None = None,
    warps: int | None = None,
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
        block: elements for one program at a time.
        programs: how many run at once, at most.
        warps: of each.

    Raises ValueError if a parameter does not divide into as many shards as `table` has entries.
    """
    if not outs:
        return
    device = check_table(table)
    contiguous("unsharded parameter", outs, device)
    refuse_conversion(dtype, outs, symmetric)
    plan = GatherPlan(outs, offsets, table.numel(), device, dims=dims, dtype=dtype, block=block)
    targets = [out.data_ptr() for out in outs]
    plan.run(targets, table, first, table.numel(), symmetric=symmetric, programs=programs, warps=warps)


def _lines(out: torch.Tensor, dim: int, shards: int) -> tuple[int, int]:
    """(lines, elements of a line) of one shard: along `dim` a shard is contiguous within a line of the parameter."""
    if out.dim() <= dim or out.shape[dim] % shards:
        raise ValueError(f"a parameter of shape {tuple(out.shape)} does not divide into {shards} shards along {dim}")
    lines = out.shape[:dim].numel() if dim else 1
    return lines, out.numel() // (lines * shards) if lines else 0
