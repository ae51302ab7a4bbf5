"""The table by which one launch works on many tensors: who handles what.

Chose a small table a launch (one row a tensor) and a walk down its first column in every program over a table with a
row for every program: it costs a few cached loads a program, and building it costs nothing to speak of, also when
addresses change with every call. A unit has some ten parameters; thousands of tensors would want a search instead.

Column 0 of a row is the number of the first program that works on it; a last row, with the number of programs, ends
the table. What the other columns hold is the kernel's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl


def row_table(programs: Sequence[int], columns: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """int64 [rows + 1, 1 + columns].

    Args:
        programs: how many work on each row; rows of none are passed over.
        columns: of each row, all equally many.
    """
    rows, first = [], 0
    for count, row in zip(programs, columns, strict=True):
        rows.append([first, *row])
        first += count
    rows.append([first, *[0] * (len(rows[0]) - 1)] if rows else [0])
    return torch.tensor(rows, dtype=torch.int64).to(device)


@triton.jit
def row_of(table: tl.tensor, program: tl.tensor, COLUMNS: tl.constexpr) -> tl.tensor:
    """Pointer to the row that `program` works on; `COLUMNS` counts column 0."""
    row = table
    while tl.load(row + COLUMNS) <= program:
        row += COLUMNS
    return row
