"""The table by which one launch works on many tensors, and launches over pairs of tensors.

Each tensor has a row. Column 0 is the number of the first program that works on it, and every program finds its row by
a binary search there; what the other columns hold is the kernel's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from odc.kernels.dtypes import kernel_dtype, word_dtype
from odc.kernels.launch import PreparedLaunch, block_of, ceil_div, contiguous, prepared
from odc.kernels.tables import passing_table

_PLANS = 64  # of launches over pairs


def row_numbers(programs: Sequence[int], columns: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], int]:
    """(the numbers of the table, row after row; rows); rows of no program are left out."""
    numbers: list[int] = []
    first = rows = 0
    for count, row in zip(programs, columns, strict=True):
        if count:
            numbers += [first, *row]
            first, rows = first + count, rows + 1
    return tuple(numbers), rows


def row_table(
    programs: Sequence[int], columns: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, int]:
    """(int64 [rows, 1 + columns], rows) for the current stream's next launches; rows of no program are left out."""
    numbers, rows = row_numbers(programs, columns)
    return passing_table(numbers, device).view(rows, -1 if rows else 1), rows


Rows = Callable[[Sequence[int], Sequence[Sequence[int]], torch.device], tuple[torch.Tensor, int]]


def fixed_rows(
    programs: Sequence[int], columns: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, int]:
    """As `row_table`, to keep, for any stream: on a device it allocates, and waits for the copy."""
    table, rows = row_table(programs, columns, torch.device("cpu"))
    return table.to(device), rows


@triton.jit
def row_of(table: tl.tensor, rows: tl.tensor, program: tl.tensor, COLUMNS: tl.constexpr) -> tl.tensor:
    """Pointer to the row that `program` works on; `COLUMNS` counts column 0."""
    low = rows * 0
    high = rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(table + middle * COLUMNS) <= program:
            low = middle
        else:
            high = middle
    return table + low * COLUMNS


PAIR_COLUMNS = tl.constexpr(5)  # first program, source, target, elements, number of the pair

_Pair = tuple[int, int, int, torch.dtype, torch.dtype]  # address of source and target, elements, their dtypes


def launch_pairs(
    kernel: Any,
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    block: int | None,
    *args: Any,
) -> None:
    """Launch `kernel(rows_at, rows, *args, TO, FROM, BLOCK)` over all elements of all pairs, once a pair of dtypes.

    All its parameters but the constants are exempt from specialization. Equal types are read as integer words. What was
    launched for the same memory before is launched again without a look at each pair. Raises ValueError if a pair is
    not equally long, not contiguous or not on one device.
    """
    if not targets:
        return
    device = targets[0].device
    contiguous("target", targets, device)
    contiguous("source", sources, device)
    pairs: list[_Pair] = []
    for target, source in zip(targets, sources, strict=True):
        n = source.numel()
        if target.numel() != n:
            raise ValueError(f"{n} elements do not fit a target of {target.numel()}")
        pairs.append((source.data_ptr(), target.data_ptr(), n, source.dtype, target.dtype))
    for run, programs, numbers, rows in _launches(kernel, block, device, tuple(pairs)):
        run(programs, passing_table(numbers, device), rows, *args)


@lru_cache(maxsize=_PLANS)
def _launches(
    kernel: Any, block: int | None, device: torch.device, pairs: tuple[_Pair, ...]
) -> list[tuple[PreparedLaunch, int, tuple[int, ...], int]]:
    """(launch, programs, numbers of the table, rows) for each pair of dtypes."""
    groups: dict[tuple[torch.dtype, torch.dtype], list[tuple[int, int, int, int]]] = {}
    for number, (source, target, n, origin, to) in enumerate(pairs):
        words = 1
        if to == origin:  # copied in words, whatever they are
            origin = word_dtype([to])
            words, to = to.itemsize // origin.itemsize, origin
        groups.setdefault((to, origin), []).append((source, target, n * words, number))
    found = []
    for (to, origin), columns in groups.items():
        size = block or block_of(kernel, max(to.itemsize, origin.itemsize), max(column[2] for column in columns))
        programs = [ceil_div(column[2], size) for column in columns]
        run = prepared(kernel, device, TO=kernel_dtype(to), FROM=kernel_dtype(origin), BLOCK=size)
        found.append((run, sum(programs), *row_numbers(programs, columns)))
    return found
