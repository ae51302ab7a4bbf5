"""accumulate and `ScatterPlan`: a unit's gradients to the ranks that own them, in one launch.

`accumulate` adds to their accumulators by relaxed atomic adds: the last bits depend on the order of arrival, and a
GPU's fp32 atomic add flushes subnormal numbers to zero. `ScatterPlan` also copies to their slots, whose contents each
owner `add`s. Peers need a pointer. Both run beside compute, so a few programs take block after block, those of all
owners at one place of the unit one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from odc.kernels.dtypes import accumulator_dtype, kernel_dtype, word_dtype
from odc.kernels.launch import BESIDE_COMPUTE, block_of, ceil_div, check_table, contiguous, prepared
from odc.kernels.rows import Rows, row_of, row_table
from odc.kernels.tables import passing_table
from odc.kernels.tile import move_tile, zero_tile

_COLUMNS = tl.constexpr(5)  # first block, number of the source, elements, elements of a shard, byte offset at the owner


@triton.jit(do_not_specialize=["rows_at", "rows", "blocks", "sources", "table", "first", "count", "shards"])
def accumulate_kernel(
    rows_at: tl.tensor,
    rows: tl.int64,
    blocks: tl.int32,
    sources: tl.tensor,
    table: tl.tensor,
    first: tl.int32,
    count: tl.int32,
    shards: tl.int32,
    TO: tl.constexpr,
    FROM: tl.constexpr,
    BLOCK: tl.constexpr,
    HOW: tl.constexpr,
) -> None:
    """Grid: any number of programs. `blocks` of one shard of all gradients; `count` owners from `first` on.

    `HOW`: "atomic"; "add"; or "copy", which fills with zeros what a gradient is short of whole shards.
    """
    item = tl.program_id(0)
    while item < blocks * count:
        owner = ((item % count + first) % shards).to(tl.int64)
        program = item // count
        row = row_of(rows_at, rows, program, _COLUMNS)
        at = (program - tl.load(row)) * BLOCK
        shard = tl.load(row + 3)
        begin = owner * shard
        n = tl.minimum(shard, tl.load(row + 2) - begin) - at
        target = tl.load(table + owner) + tl.load(row + 4) + at * (TO.primitive_bitwidth // 8)
        if n > 0:
            source = tl.load(sources + tl.load(row + 1)) + (begin + at) * (FROM.primitive_bitwidth // 8)
            move_tile(target, source, n, TO, FROM, BLOCK, HOW)
        if HOW == "copy":
            zero_tile(target, n, shard - at, TO, BLOCK)
        item += tl.num_programs(0)


class ScatterPlan:
    """What stays the same from push to push of a unit's gradients of one dtype, on the device.

    `numels` are elements of the gradients, which may be short of whole shards; `shard_numels` and `offsets` as of
    `accumulate`. With `to` the gradients are added to accumulators of that dtype, else copied to slots; with
    `alone` no other thread adds to them meanwhile, and plain loads and stores suffice.
    `make_rows` as of `GatherPlan`.
    """

    def __init__(
        self,
        numels: Sequence[int],
        shard_numels: Sequence[int],
        offsets: Sequence[int],
        dtype: torch.dtype,
        shards: int,
        device: torch.device,
        *,
        to: torch.dtype | None = None,
        alone: bool = False,
        block: int | None = None,
        make_rows: Rows = row_table,
    ) -> None:
        write = kernel_dtype(word_dtype([dtype])) if to is None else accumulator_dtype(to)
        read, width = (write, dtype.itemsize) if to is None else (kernel_dtype(dtype), to.itemsize)
        how = "copy" if to is None else "add" if alone else "atomic"
        # What lies beyond the end of a gradient is zeroed in a slot, and nothing to add.
        longest = [shard if how == "copy" else min(shard, n) for n, shard in zip(numels, shard_numels, strict=True)]
        size = block or block_of(accumulate_kernel, max(width, dtype.itemsize), max(longest, default=1))
        counts = [ceil_div(n, size) for n in longest]
        columns = [
            (i, n, shard, offset * width)
            for i, (n, shard, offset) in enumerate(zip(numels, shard_numels, offsets, strict=True))
        ]
        self.device, self._shards, self._blocks = device, shards, sum(counts)
        self._rows = make_rows(counts, columns, device)
        self._launch = prepared(accumulate_kernel, device, TO=write, FROM=read, BLOCK=size, HOW=how)

    def run(
        self,
        sources: Sequence[int],
        table: torch.Tensor,
        first: int,
        count: int,
        *,
        programs: int | None = None,
        warps: int | None = None,
    ) -> None:
        """Launch: send the gradients at the addresses `sources` to `count` owners, beginning with owner `first`.

        `table`: int64 [shards] on the device: address of each owner's accumulator or slot.
        """
        self._launch(
            min(self._blocks * count, programs or BESIDE_COMPUTE),
            *(*self._rows, self._blocks, passing_table(sources, self.device), table, first, count, self._shards),
            warps=warps,
        )


def accumulate(
    gradients: Sequence[torch.Tensor],
    shard_numels: Sequence[int],
    offsets: Sequence[int],
    table: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    first: int = 0,
    block: int | None = None,
    programs: int | None = None,
    warps: int | None = None,
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
        block: elements for one program at a time.
        programs: how many run at once, at most.
        warps: of each.
    """
    device = check_table(table)
    accumulator_dtype(dtype)
    contiguous("gradient", gradients, device)
    for source in dict.fromkeys(gradient.dtype for gradient in gradients):
        mine = [i for i, gradient in enumerate(gradients) if gradient.dtype == source]
        plan = ScatterPlan(
            [gradients[i].numel() for i in mine],
            [shard_numels[i] for i in mine],
            [offsets[i] for i in mine],
            source,
            table.numel(),
            device,
            to=dtype,
            block=block,
        )
        addresses = [gradients[i].data_ptr() for i in mine]
        plan.run(addresses, table, first, table.numel(), programs=programs, warps=warps)
