"""The table by which one launch works on many tensors: who handles what.

Chose a small table a launch (one row a tensor) and a binary search in its first column by every program over a table
with a row for every program: that is a handful of cached loads a program, also for hundreds of tensors, and building it
costs nothing to speak of when addresses change with every call.

Column 0 of a row is the number of the first program that works on it. What the other columns hold is the kernel's
business.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

_KEPT = 1024  # tables; each takes 512 bytes of a device or a few more


def row_table(
    programs: Sequence[int], columns: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, int]:
    """(int64 [rows, 1 + columns], rows), ready for a kernel in the current stream (see `on_device`).

    Args:
        programs: how many work on each row; rows of none are left out.
        columns: of each row, all equally many.
    """
    numbers: list[int] = []
    first = rows = 0
    for count, row in zip(programs, columns, strict=True):
        if count:
            numbers += [first, *row]
            first, rows = first + count, rows + 1
    return on_device(numbers, device).view(rows, -1 if rows else 1), rows


def pointer_table(addresses: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 [peers]: what kernels take as a pointer table, for launches in the current stream (see `on_device`)."""
    return on_device(addresses, device)


def on_device(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64, 1-D, never to be written to. Does not wait for the device: the copy is one more operation of the stream.

    The same numbers come back as the same tensor, without a copy, for as long as they are asked for in the same stream
    now and then: a unit is often fetched to where it was fetched before.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _kept(tuple(numbers), device, stream)


@lru_cache(maxsize=_KEPT)
def _kept(numbers: tuple[int, ...], device: torch.device, stream: int) -> torch.Tensor:
    """One stream alone uses it: its work follows the copy, and memory given back serves that stream first."""
    on_cuda = device.type == "cuda"
    # From pageable memory torch would wait for the copy, and so for all that the stream was asked to do before.
    host = torch.tensor(numbers, dtype=torch.int64, pin_memory=on_cuda and len(numbers) > 0)
    return host.to(device, non_blocking=True) if on_cuda else host


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
