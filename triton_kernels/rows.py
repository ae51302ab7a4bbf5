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

from odc.kernels.launch import block_of, ceil_div, contiguous, launch

_KEPT = 1024  # tables; each takes 512 bytes of a device or a few more


def row_table(
    programs: Sequence[int], columns: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, int]:
    """(int64 [rows, 1 + columns], rows), ready for a kernel in the current stream; rows of no program are left out."""
    numbers: list[int] = []
    first = rows = 0
    for count, row in zip(programs, columns, strict=True):
        if count:
            numbers += [first, *row]
            first, rows = first + count, rows + 1
    return pointer_table(numbers, device).view(rows, -1 if rows else 1), rows


Rows = Callable[[Sequence[int], Sequence[Sequence[int]], torch.device], tuple[torch.Tensor, int]]


def fixed_rows(
    programs: Sequence[int], columns: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, int]:
    """As `row_table`, for any stream: on a device it waits for the copy."""
    table, rows = row_table(programs, columns, torch.device("cpu"))
    return table.to(device), rows


def pointer_table(addresses: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64, 1-D, read-only. Does not wait for the device: the copy is one more operation of the current stream.

    The latest tables are cached by stream: a unit is often fetched to where it was fetched before.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _kept(tuple(addresses), device, stream)


@lru_cache(maxsize=_KEPT)
def _kept(numbers: tuple[int, ...], device: torch.device, stream: int) -> torch.Tensor:
    """Used by one stream only: its work follows the copy, and freed memory is reused by that stream first."""
    on_cuda = device.type == "cuda"
    # From pageable memory torch would wait for the copy, and so for all earlier work of the stream.
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


PAIR_COLUMNS = tl.constexpr(4)  # first program, source, target, elements

#: From the dtypes of target and source to the triton types that the kernel writes and reads.
Types = Callable[[torch.dtype, torch.dtype], tuple[Any, Any]]


def launch_pairs(
    kernel: Any,
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    types: Types,
    block: int | None,
    *args: Any,
) -> None:
    """Launch `kernel(rows_at, rows, *args, TO, FROM, BLOCK)` over all elements of all pairs, once a pair of dtypes.

    Raises ValueError if a pair is not equally long, not contiguous or not on one device.
    """
    if not targets:
        return
    device = targets[0].device
    contiguous("target", targets, device)
    contiguous("source", sources, device)
    groups: dict[tuple[torch.dtype, torch.dtype], list[tuple[int, int, int]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if target.numel() != source.numel():
            raise ValueError(f"{source.numel()} elements do not fit a target of {target.numel()}")
        addresses = source.data_ptr(), target.data_ptr(), target.numel()
        groups.setdefault((target.dtype, source.dtype), []).append(addresses)
    for (to, origin), pairs in groups.items():
        size = block or block_of(kernel, max(to.itemsize, origin.itemsize), max(n for _, _, n in pairs))
        programs = [ceil_div(n, size) for _, _, n in pairs]
        write, read = types(to, origin)
        rows = row_table(programs, pairs, device)
        launch(kernel, (sum(programs),), device, *rows, *args, TO=write, FROM=read, BLOCK=size)
