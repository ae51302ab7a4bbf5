"""unpack: packed runs of rows to the places where they belong, the inverse of `pack`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from odc.kernels.pack import launch_runs, packed_places


def unpack(
    packed: torch.Tensor, starts: Sequence[int], lengths: Sequence[int], rows: torch.Tensor, *, block: int | None = None
) -> int:
    """Copy the runs that lie one after the other in `packed` to rows [start, start + length) of `rows`.

    Waits for nobody. One launch, on the current stream; see `launch` for threads and errors.

    Args:
        packed: contiguous [rows, ...], of any dtype.
        starts: first row of each run in `rows`; runs must not overlap.
        lengths: rows of each run, 0 or more.
        rows: contiguous [rows, ...], of the same dtype and trailing shape; rows of no run stay as they are.
        block: elements for one program.

    Returns:
        rows written.

    Raises:
        ValueError: a run lies outside of `rows`, or `packed` is too short; says what is needed.
    """
    places = packed_places(rows, starts, lengths, packed)
    launch_runs(packed, places, rows, starts, lengths, block)
    return sum(lengths)


def unpack_reference(packed: torch.Tensor, starts: Sequence[int], lengths: Sequence[int], rows: torch.Tensor) -> int:
    """The same in plain torch."""
    end = 0
    for start, length in zip(starts, lengths, strict=True):
        rows[start : start + length] = packed[end : end + length]
        end += length
    return end
