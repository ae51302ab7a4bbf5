"""put: tensors side by side into a peer's memory (a staging slot), then a word that marks their arrival.

Every program makes its stores visible and counts itself in an int32 of scratch, and the last one stores the word with
release at system scope, so a thread that acquires the word sees the data. Each launch leaves the count at zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from odc.kernels.dtypes import kernel_dtype, word_dtype
from odc.kernels.launch import block_of, ceil_div, check_table, contiguous, launch
from odc.kernels.nvshmem import (
    SIGNAL_SET,
    Symmetric,
    first_thread,
    options_for,
    putmem_block,
    putmem_signal_block,
    quiet,
    signal_op,
)
from odc.kernels.rows import row_of, row_table
from odc.kernels.tile import move_tile

_COLUMNS = tl.constexpr(4)  # first program, source, byte offset from the beginning of the put, elements


@dataclass(frozen=True)
class Signal:
    """The word that announces a complete put to the peer."""

    offset: int  # of an int64 word in the peer's memory, in bytes; 8-byte aligned
    value: int  # to store there
    arrived: torch.Tensor  # int32 [1] on the launching device, zero; for one stream alone


@triton.jit
def _signal(base: tl.tensor, offset: tl.tensor, value: tl.tensor) -> None:
    """Store `value` with release into the word at `offset` of the memory at `base`."""
    tl.atomic_xchg((base + offset).to(tl.pointer_type(tl.int64)), value, sem="release", scope="sys")


@triton.jit
def _count(arrived: tl.tensor, programs: tl.tensor) -> tl.tensor:
    """Count this program; True in the last one, to which the stores of all are visible."""
    tl.debug_barrier()  # the stores of the program's other threads come before its count
    return tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == programs - 1


@triton.jit(
    do_not_specialize=["rows_at", "rows", "table", "peer", "own", "pes", "offset", "arrived", "word_offset", "value"]
)
def put_kernel(
    rows_at: tl.tensor,
    rows: tl.int64,
    table: tl.tensor,
    peer: tl.int64,
    own: tl.int64,
    pes: tl.tensor,
    offset: tl.int64,
    arrived: tl.tensor,
    word_offset: tl.int64,
    value: tl.int64,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
    SIGNAL: tl.constexpr,
    ONE: tl.constexpr,
    NVSHMEM: tl.constexpr,
) -> None:
    """Grid: blocks of all tensors. `ONE`: there is one tensor, which NVSHMEM can signal with."""
    program = tl.program_id(0)
    row = row_of(rows_at, rows, program, _COLUMNS)
    at = (program - tl.load(row)) * BLOCK
    n = tl.load(row + 3)
    size = WORD.primitive_bitwidth // 8
    source = tl.load(row + 1) + at * size
    place = offset.to(tl.int64) + tl.load(row + 2) + at * size
    base = tl.load(table + peer)
    word_offset = word_offset.to(tl.int64)
    value = value.to(tl.int64)
    if NVSHMEM:
        if base == 0:
            pe = tl.load(pes + peer)
            if ONE and SIGNAL:
                if at == 0:
                    putmem_signal_block(own + place, source, n * size, own + word_offset, value, SIGNAL_SET, pe)
            else:
                if at == 0:
                    putmem_block(own + place, source, n * size, pe)
                if SIGNAL:
                    quiet()
                    if _count(arrived, tl.num_programs(0)):
                        tl.atomic_xchg(arrived, 0, sem="relaxed", scope="gpu")
                        if first_thread():
                            signal_op(own + word_offset, value, SIGNAL_SET, pe)
        else:
            move_tile(base + place, source, n - at, WORD, WORD, BLOCK, "copy")
            if SIGNAL:
                if _count(arrived, tl.num_programs(0)):
                    tl.atomic_xchg(arrived, 0, sem="relaxed", scope="gpu")
                    _signal(base, word_offset, value)
    else:
        move_tile(base + place, source, n - at, WORD, WORD, BLOCK, "copy")
        if SIGNAL:
            if _count(arrived, tl.num_programs(0)):
                tl.atomic_xchg(arrived, 0, sem="relaxed", scope="gpu")
                _signal(base, word_offset, value)


def put(
    values: Sequence[torch.Tensor],
    table: torch.Tensor,
    peer: int,
    offset: int = 0,
    *,
    signal: Signal | None = None,
    symmetric: Symmetric | None = None,
    block: int | None = None,
) -> None:
    """Copy `values`, one after the other, to byte `offset` on of the memory of `peer`; then signal.

    Does not wait: the caller has seen that the place is free. One launch, on the current stream; see `launch` for
    threads and errors. A put of no elements signals nothing.

    Args:
        values: contiguous, of any dtype; bytes are copied.
        table: int64 [peers] on the device of `values`: address of each peer's memory, 0 where no pointer reaches it.
        peer: index into `table`.
        offset: in bytes.
        signal: the word to store once all is there.
        symmetric: how to reach peers without a pointer.
        block: elements for one program, in words of the smallest dtype.
    """
    values = [value for value in values if value.numel()]
    if not values:
        return
    device = check_table(table)
    contiguous("value", values, device)
    word = word_dtype([value.dtype for value in values])
    numels = [value.nbytes // word.itemsize for value in values]
    size = block or block_of(put_kernel, word.itemsize, max(numels))
    places = [sum(numels[:i]) * word.itemsize for i in range(len(numels))]
    programs = [ceil_div(n, size) for n in numels]
    columns = [(v.data_ptr(), at, n) for v, at, n in zip(values, places, numels, strict=True)]
    if signal is not None:
        if signal.offset % 8:
            raise ValueError(f"a word is 8-byte aligned; there is none at byte {signal.offset}")
        if signal.arrived.dtype != torch.int32 or signal.arrived.device != device:
            raise ValueError(f"arrivals are counted in an int32 on {device}, not in {signal.arrived}")
    announced = (signal.arrived, signal.offset, signal.value) if signal is not None else (table, 0, 0)
    args, constants = options_for(table, symmetric)
    launch(
        put_kernel,
        (sum(programs),),
        device,
        *(*row_table(programs, columns, device), table, peer, *args, offset, *announced),
        WORD=kernel_dtype(word),
        BLOCK=size,
        SIGNAL=signal is not None,
        ONE=len(values) == 1,
        **constants,
    )
