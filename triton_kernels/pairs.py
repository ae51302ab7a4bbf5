"""Launching a kernel that works on pairs of equally long tensors, however many: one launch for each pair of dtypes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from odc.kernels.launch import block_of, contiguous, launch
from odc.kernels.rows import row_table

PAIR_COLUMNS = tl.constexpr(4)  # first program, source, target, elements

#: From the dtypes of target and source to the element types, triton's, that the kernel writes and reads.
Types = Callable[[torch.dtype, torch.dtype], tuple[Any, Any]]


def launch_pairs(
    kernel: Any,
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    types: Types,
    block: int | None,
) -> None:
    """Launch `kernel(rows, TO, FROM, BLOCK)` over all elements of all pairs.

    Raises:
        ValueError: a pair is not equally long, not contiguous or not on one device.
    """
    if not targets:
        return
    device = targets[0].device
    contiguous("target", targets, device)
    contiguous("source", sources, device)
    groups: dict[tuple[torch.dtype, torch.dtype], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if target.numel() != source.numel():
            raise ValueError(f"{source.numel()} elements do not fit a target of {target.numel()}")
        groups.setdefault((target.dtype, source.dtype), []).append((target, source))
    for (to, origin), group in groups.items():
        size = block or block_of(kernel, max(to.itemsize, origin.itemsize), max(t.numel() for t, _ in group))
        write, read = types(to, origin)
        programs = [triton.cdiv(target.numel(), size) for target, _ in group]
        columns = [(source.data_ptr(), target.data_ptr(), target.numel()) for target, source in group]
        rows = row_table(programs, columns, device)
        launch(kernel, (sum(programs),), device, rows, TO=write, FROM=read, BLOCK=size)
