"""Launching a kernel that works on pairs of equally long runs, however many: one launch for each pair of dtypes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton.language as tl

from odc.kernels.launch import block_of, ceil_div, contiguous, launch
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
    """Launch `kernel(rows_at, rows, TO, FROM, BLOCK)` over all elements of all pairs of tensors.

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
        pairs = [(source.data_ptr(), target.data_ptr(), target.numel()) for target, source in group]
        launch_addresses(kernel, pairs, types(to, origin), max(to.itemsize, origin.itemsize), device, block)


def launch_addresses(
    kernel: Any,
    pairs: Sequence[tuple[int, int, int]],
    types: tuple[Any, Any],
    itemsize: int,
    device: torch.device,
    block: int | None,
) -> None:
    """The same for addresses.

    Args:
        kernel: see `launch_pairs`.
        pairs: addresses of source and target, and elements.
        types: triton's, that the kernel writes and reads.
        itemsize: bytes of the larger of them.
        device: that the memory is on.
        block: elements for one program.
    """
    size = block or block_of(kernel, itemsize, max((n for _, _, n in pairs), default=0))
    programs = [ceil_div(n, size) for _, _, n in pairs]
    write, read = types
    launch(kernel, (sum(programs),), device, *row_table(programs, pairs, device), TO=write, FROM=read, BLOCK=size)
