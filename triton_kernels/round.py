"""round: the sums of a unit as they cross between hosts, in 8 bits and in bf16, and what rounding has taken off them.

The bytes are those of `odc.movers.int8` and of torch's bf16: divisions are rounded to nearest, no product is fused with
a sum, and nothing subnormal is flushed. A program has some blocks of one parameter, each block in one warp.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from odc.kernels.dtypes import cast
from odc.kernels.launch import PreparedLaunch, block_of, ceil_div
from odc.kernels.rows import Rows, fixed_rows, row_of, row_table

BLOCK = 128  # elements that share a scale; the format

# first program, elements before the parameter, elements, byte offset in the rounded sum, whether it crosses in 8 bits
_COLUMNS = tl.constexpr(5)
_BLOCK = tl.constexpr(BLOCK)
_LEVELS = tl.constexpr(127.0)
_TINY = tl.constexpr(2.0**-126)  # the least normal number
_MAGNITUDE, _INFINITE, _NAN = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x7F800000), tl.constexpr(0x7FC00000)
_HALVES = tl.constexpr(1.5 * 2.0**23)  # a small number added to this is rounded to a whole one, half-way to even


@triton.jit(do_not_specialize=["rows_at", "rows", "total", "memory"])
def round_kernel(rows_at: tl.tensor, rows: tl.int64, total: tl.int64, memory: tl.int64, BLOCKS: tl.constexpr) -> None:
    """Grid: BLOCKS blocks each, of all parameters."""
    row, first, n = _share(rows_at, rows, BLOCKS)
    values = _loaded(total + (tl.load(row + 1) + first) * 4, n, tl.float32, 16, BLOCKS)
    place = memory + tl.load(row + 3)
    if tl.load(row + 4) != 0:
        top = tl.max(values.to(tl.int32, bitcast=True) & _MAGNITUDE, axis=1)
        scale = tl.div_rn(top.to(tl.float32, bitcast=True), _LEVELS)
        sent = (top < _INFINITE) & (scale >= _TINY)
        scale = tl.where(sent, scale, 1.0)
        inverse = tl.div_rn(tl.where(sent, 1.0, 0.0), scale)
        codes = tl.where(sent[:, None], values, 0.0) * inverse[:, None] + _HALVES - _HALVES
        kept = tl.where(sent, scale.to(tl.int32, bitcast=True), tl.where(top < _INFINITE, 0, _NAN))
        each = tl.arange(0, BLOCKS)
        scales = (place + first // _BLOCK * 4).to(tl.pointer_type(tl.int32)) + each
        tl.store(scales, kept, mask=each < (n + _BLOCK - 1) // _BLOCK)
        _store(_codes_at(place, row) + first, codes.to(tl.int32).to(tl.int8), n, tl.int8, 4, BLOCKS)
    else:
        _store(place + first * 2, cast(values, tl.bfloat16), n, tl.bfloat16, 16, BLOCKS)


@triton.jit(do_not_specialize=["rows_at", "rows", "total", "memory", "into"])
def add_rounded_kernel(
    rows_at: tl.tensor, rows: tl.int64, total: tl.int64, memory: tl.int64, into: tl.int64, BLOCKS: tl.constexpr
) -> None:
    """Grid: as of `round_kernel`. `into` may be `total`."""
    row, first, n = _share(rows_at, rows, BLOCKS)
    skip = (tl.load(row + 1) + first) * 4
    values = _loaded(total + skip, n, tl.float32, 16, BLOCKS) + _crossed(row, memory, first, n, BLOCKS)
    _store(into + skip, values, n, tl.float32, 16, BLOCKS)


@triton.jit(do_not_specialize=["rows_at", "rows", "total", "memory", "residual"])
def keep_kernel(
    rows_at: tl.tensor, rows: tl.int64, total: tl.int64, memory: tl.int64, residual: tl.int64, BLOCKS: tl.constexpr
) -> None:
    """Grid: as of `round_kernel`, of the parameters whose residual becomes another."""
    row, first, n = _share(rows_at, rows, BLOCKS)
    skip = (tl.load(row + 1) + first) * 4
    left = _loaded(total + skip, n, tl.float32, 16, BLOCKS) - _crossed(row, memory, first, n, BLOCKS)
    before = _loaded(residual + skip, n, tl.float32, 16, BLOCKS)
    finite = (left.to(tl.int32, bitcast=True) & _MAGNITUDE) < _INFINITE
    _store(residual + skip, tl.where(finite, left, before), n, tl.float32, 16, BLOCKS)


@triton.jit
def _share(rows_at: tl.tensor, rows: tl.tensor, BLOCKS: tl.constexpr) -> Any:
    """The row of this program, the first element of its parameter that is this program's, and how many are."""
    program = tl.program_id(0)
    row = row_of(rows_at, rows, program, _COLUMNS)
    first = (program - tl.load(row)) * (BLOCKS * _BLOCK)
    return row, first, tl.minimum(tl.load(row + 2) - first, BLOCKS * _BLOCK).to(tl.int32)


@triton.jit
def _codes_at(place: tl.tensor, row: tl.tensor) -> tl.tensor:
    """Address of the codes of a parameter, behind its scales."""
    return place + (tl.load(row + 2) + _BLOCK - 1) // _BLOCK * 4


@triton.jit
def _crossed(row: tl.tensor, memory: tl.tensor, first: tl.tensor, n: tl.tensor, BLOCKS: tl.constexpr) -> tl.tensor:
    """fp32 [BLOCKS, BLOCK]: what another host reads out of the rounded sum; zeros behind `n`."""
    place = memory + tl.load(row + 3)
    if tl.load(row + 4) != 0:
        each = tl.arange(0, BLOCKS)
        scales = (place + first // _BLOCK * 4).to(tl.pointer_type(tl.float32)) + each
        scale = tl.load(scales, mask=each < (n + _BLOCK - 1) // _BLOCK, other=0)
        codes = _loaded(_codes_at(place, row) + first, n, tl.int8, 4, BLOCKS)
        values = codes.to(tl.float32) * scale[:, None]
    else:
        values = cast(_loaded(place + first * 2, n, tl.bfloat16, 16, BLOCKS), tl.float32)
    return values


@triton.jit
def _each(BLOCKS: tl.constexpr) -> tl.tensor:
    return tl.arange(0, BLOCKS)[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]


@triton.jit
def _loaded(
    source: tl.tensor, n: tl.tensor, FROM: tl.constexpr, ALIGN: tl.constexpr, BLOCKS: tl.constexpr
) -> tl.tensor:
    """[BLOCKS, BLOCK]: `n` elements, and zeros. Many are read at once if they lie at a multiple of ALIGN bytes."""
    each = _each(BLOCKS)
    if source % ALIGN == 0:
        read = tl.multiple_of(source.to(tl.pointer_type(FROM)), ALIGN) + each
        done = tl.multiple_of(n // 16 * 16, 16)
        values = tl.load(read, mask=each < done, other=0)
        if done < n:
            values = tl.where(each < done, values, tl.load(read, mask=(each >= done) & (each < n), other=0))
    else:
        values = tl.load(source.to(tl.pointer_type(FROM)) + each, mask=each < n, other=0)
    return values


@triton.jit
def _store(
    target: tl.tensor, values: tl.tensor, n: tl.tensor, TO: tl.constexpr, ALIGN: tl.constexpr, BLOCKS: tl.constexpr
) -> None:
    """The first `n` of [BLOCKS, BLOCK]; as of `_loaded`."""
    each = _each(BLOCKS)
    if target % ALIGN == 0:
        write = tl.multiple_of(target.to(tl.pointer_type(TO)), ALIGN) + each
        done = tl.multiple_of(n // 16 * 16, 16)
        tl.store(write, values, mask=each < done)
        if done < n:
            tl.store(write, values, mask=(each >= done) & (each < n))
    else:
        tl.store(target.to(tl.pointer_type(TO)) + each, values, mask=each < n)


class RoundingPlan:
    """How the sums of one unit are rounded, laid out as by `odc.protocol.rounding.RoundedUnit`, whose bytes these are.

    Kernels are compiled and loaded when it is made. Any thread may call `write` and `add`, which allocate nothing;
    nothing waits, and each call is one launch on the current stream. What is passed is contiguous and on the plan's
    device.

    Args:
        params: of each parameter the elements in the sum, one after the other; the byte offset in the rounded sum, a
            multiple of 16; and whether it crosses in 8 bits, else in bf16.
    """

    def __init__(self, params: Sequence[tuple[int, int, bool]], device: torch.device) -> None:
        numels = [numel for numel, _, _ in params]
        self._device = device
        before = [0, *itertools.accumulate(numels)]
        self._columns = [(at, *param) for at, param in zip(before, params, strict=False)]
        self._elements = max(BLOCK, block_of(round_kernel, 4, max(numels, default=0)))  # of a program
        kernels = (round_kernel, add_rounded_kernel, keep_kernel)
        self._round, self._add, self._keep = (
            PreparedLaunch(kernel, device, BLOCKS=self._elements // BLOCK) for kernel in kernels
        )
        self._programs, self._rows = self._table(self._columns, fixed_rows)
        nothing = fixed_rows([1], [(0, 0, 0, 0)], device)  # one program, without an element
        self._round(1, *nothing, 0, 0)
        self._add(1, *nothing, 0, 0, 0)
        self._keep(1, *nothing, 0, 0, 0)

    def write(self, total: torch.Tensor, memory: torch.Tensor) -> None:
        """Round `total`, fp32 [numel], into `memory`, uint8, at a multiple of 16 bytes."""
        self._round(self._programs, *self._rows, total.data_ptr(), memory.data_ptr())

    def add(self, total: torch.Tensor, memory: torch.Tensor, into: torch.Tensor) -> None:
        """Write `total`, fp32 [numel], plus the sum that lies in `memory` to `into`, which may be `total`."""
        self._add(self._programs, *self._rows, total.data_ptr(), memory.data_ptr(), into.data_ptr())

    def keep(self, total: torch.Tensor, memory: torch.Tensor, residual: torch.Tensor, used: Sequence[bool]) -> None:
        """Set `residual`, fp32 [numel], to what rounding took off `total`, for the parameters that are `used`, where
        the sum was finite.
        """
        programs, rows = self._programs, self._rows
        if not all(one or not numel for one, (_, numel, _, _) in zip(used, self._columns, strict=True)):
            programs, rows = self._table(itertools.compress(self._columns, used), row_table)
        self._keep(programs, *rows, total.data_ptr(), memory.data_ptr(), residual.data_ptr())

    def _table(self, columns: Iterable[tuple[int, ...]], make: Rows) -> tuple[int, tuple[torch.Tensor, int]]:
        """(programs, the rows that they work on)."""
        some = list(columns)
        programs = [ceil_div(numel, self._elements) for _, numel, _, _ in some]
        return sum(programs), make(programs, some, self._device)
