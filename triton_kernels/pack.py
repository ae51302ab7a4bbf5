"""pack: runs of rows, of any lengths and in any order, side by side (what a batch exchange sends to one rank).

Chose to handle runs as `publish` handles parameters, by its kernel, over a program for each row: a run of rows is
contiguous, token rows are short, and a long run keeps the whole device busy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from odc.kernels.dtypes import kernel_dtype, word_dtype
from odc.kernels.launch import contiguous
from odc.kernels.pairs import launch_addresses
from odc.kernels.publish import publish_kernel


def pack(
    rows: torch.Tensor, starts: Sequence[int], lengths: Sequence[int], out: torch.Tensor, *, block: int | None = None
) -> int:
    """Copy rows [start, start + length) of `rows` for each run, one after the other, to the beginning of `out`.

    Waits for nobody. One launch, on the current stream; see `launch` for threads and errors.

    Args:
        rows: contiguous [rows, ...], of any dtype.
        starts: first row of each run; runs may overlap.
        lengths: rows of each run, 0 or more.
        out: contiguous [rows, ...], of the same dtype and trailing shape; longer than needed is allowed.
        block: elements for one program.

    Returns:
        rows written.

    Raises:
        ValueError: a run lies outside of `rows`, or `out` is too short; says what is needed.
    """
    places = packed_places(rows, starts, lengths, out)
    launch_runs(rows, starts, out, places, lengths, block)
    return sum(lengths)


def packed_places(rows: torch.Tensor, starts: Sequence[int], lengths: Sequence[int], packed: torch.Tensor) -> list[int]:
    """First row of each run in `packed`; raises `ValueError` unless everything fits."""
    if rows.dtype != packed.dtype or rows.shape[1:] != packed.shape[1:]:
        raise ValueError(
            f"rows {rows.dtype} {tuple(rows.shape)} and packed rows {packed.dtype} {tuple(packed.shape)} are not alike"
        )
    contiguous("rows and packed rows: tensor", [rows, packed], rows.device)
    places, end = [], 0
    for start, length in zip(starts, lengths, strict=True):
        if start < 0 or length < 0 or start + length > rows.shape[0]:
            raise ValueError(f"a run of {length} rows from row {start} is not within {rows.shape[0]} rows")
        places.append(end)
        end += length
    if end > packed.shape[0]:
        raise ValueError(f"{len(places)} runs take {end} packed rows; there is room for {packed.shape[0]}")
    return places


def launch_runs(
    source: torch.Tensor,
    sources: Sequence[int],
    target: torch.Tensor,
    targets: Sequence[int],
    lengths: Sequence[int],
    block: int | None,
) -> None:
    """Copy `lengths` rows from each of `sources` to each of `targets` (first rows)."""
    word = word_dtype([source.dtype])
    words = source.shape[1:].numel()
    nbytes = words * word.itemsize
    runs = [
        (source.data_ptr() + here * nbytes, target.data_ptr() + there * nbytes, length * words)
        for here, there, length in zip(sources, targets, lengths, strict=True)
    ]
    types = kernel_dtype(word), kernel_dtype(word)
    launch_addresses(publish_kernel, runs, types, word.itemsize, source.device, block)


def pack_reference(rows: torch.Tensor, starts: Sequence[int], lengths: Sequence[int], out: torch.Tensor) -> int:
    """The same in plain torch."""
    end = 0
    for start, length in zip(starts, lengths, strict=True):
        out[end : end + length] = rows[start : start + length]
        end += length
    return end
