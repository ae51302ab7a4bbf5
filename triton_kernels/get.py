"""get: a slice of a peer's memory to local memory, loaded by the reader and converted on the way if asked."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from odc.errors import UnsupportedError
from odc.kernels.dtypes import kernel_dtype, word_dtype
from odc.kernels.launch import block_of, ceil_div, check_table, contiguous, launch
from odc.kernels.nvshmem import Symmetric, getmem_block, options_for
from odc.kernels.tile import move_tile


@triton.jit
def pull(
    target: tl.tensor,
    table: tl.tensor,
    peer: tl.tensor,
    own: tl.tensor,
    pes: tl.tensor,
    offset: tl.tensor,
    at: tl.tensor,
    n: tl.tensor,
    TO: tl.constexpr,
    FROM: tl.constexpr,
    BLOCK: tl.constexpr,
    NVSHMEM: tl.constexpr,
) -> None:
    """Copy one program's share of a run of `n` elements at byte `offset` of `peer`: those from element `at` on.

    NVSHMEM moves a whole run at once, in the program with its first element. All numbers are int64.
    """
    base = tl.load(table + peer)
    source = base + offset + at * (FROM.primitive_bitwidth // 8)
    place = target + at * (TO.primitive_bitwidth // 8)
    if NVSHMEM:
        if base == 0:
            if at == 0:
                getmem_block(target, own + offset, n * (FROM.primitive_bitwidth // 8), tl.load(pes + peer))
        else:
            move_tile(place, source, n - at, TO, FROM, BLOCK, "copy")
    else:
        move_tile(place, source, n - at, TO, FROM, BLOCK, "copy")


@triton.jit(do_not_specialize=["target", "table", "peer", "own", "pes", "offset", "n"])
def get_kernel(
    target: tl.int64,
    table: tl.tensor,
    peer: tl.int64,
    own: tl.int64,
    pes: tl.tensor,
    offset: tl.int64,
    n: tl.int64,
    TO: tl.constexpr,
    FROM: tl.constexpr,
    BLOCK: tl.constexpr,
    NVSHMEM: tl.constexpr,
) -> None:
    """Grid: blocks of the slice."""
    at = tl.program_id(0).to(tl.int64) * BLOCK
    pull(target, table, peer, own, pes, offset.to(tl.int64), at, n.to(tl.int64), TO, FROM, BLOCK, NVSHMEM)


def get(
    out: torch.Tensor,
    table: torch.Tensor,
    peer: int,
    offset: int = 0,
    *,
    dtype: torch.dtype | None = None,
    symmetric: Symmetric | None = None,
    block: int | None = None,
) -> None:
    """Fill `out` from byte `offset` on of the memory of `peer` in the pointer table.

    Does not wait: the caller has seen that the peer has published it. One launch, on the current stream; see `launch`
    for threads and errors.

    Args:
        out: contiguous, any shape.
        table: int64 [peers] on the device of `out`: address of each peer's memory, 0 where no pointer reaches it.
        peer: index into `table`.
        offset: in bytes.
        dtype: of the peer's elements, where `out` is to be converted from another; else bytes are copied.
        symmetric: how to reach peers without a pointer; they cannot convert.
        block: elements for one program.
    """
    device = check_table(table)
    contiguous("destination", [out], device)
    refuse_conversion(dtype, [out], symmetric)
    to, source = copy_types(dtype, [out])
    n = out.nbytes // to.itemsize
    block = block or block_of(get_kernel, max(to.itemsize, source.itemsize), n)
    args, constants = options_for(table, symmetric)
    launch(
        get_kernel,
        (ceil_div(n, block),),
        device,
        *(out.data_ptr(), table, peer, *args, offset, n),
        TO=kernel_dtype(to),
        FROM=kernel_dtype(source),
        BLOCK=block,
        **constants,
    )


def copy_types(dtype: torch.dtype | None, outs: Sequence[torch.Tensor]) -> tuple[torch.dtype, torch.dtype]:
    """(element type to write, to read) for copies into `outs`: integer words unless something is to be converted."""
    found = {out.dtype for out in outs}
    if dtype is None or found <= {dtype}:
        word = word_dtype(found)
        return word, word
    if len(found) > 1:
        raise ValueError(f"destinations of one launch that converts share a dtype; these are {found}")
    return found.pop(), dtype


def refuse_conversion(dtype: torch.dtype | None, outs: Sequence[torch.Tensor], symmetric: Symmetric | None) -> None:
    """NVSHMEM moves bytes: raise `UnsupportedError` if they were to be converted."""
    if symmetric is not None and dtype is not None and any(out.dtype != dtype for out in outs):
        raise UnsupportedError(
            f"peers without a pointer send bytes: {dtype} cannot be converted on the way; publish in compute dtype"
        )
