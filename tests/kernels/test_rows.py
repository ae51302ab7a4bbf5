"""The table by which a launch finds what each of its programs works on."""

from __future__ import annotations

import torch
from support.on_ranks import on_interpreted_ranks


@on_interpreted_ranks(1)
def test_tables(rank: int, world: int) -> None:
    from odc.kernels.rows import row_table

    cpu = torch.device("cpu")
    table, rows = row_table([2, 0, 3, 0], [(7, 8), (5, 6), (3, 4), (1, 2)], cpu)
    assert table.dtype == torch.int64 and table.is_contiguous()
    assert table.tolist() == [[0, 7, 8], [2, 3, 4]] and rows == 2
    none, rows = row_table([0], [(1, 2)], cpu)
    assert none.numel() == rows == 0


@on_interpreted_ranks(1)
def test_every_program_finds_its_row(rank: int, world: int) -> None:
    """Rows of one program, of many and of none; every element is copied once, nothing else is touched."""
    from odc.kernels import publish

    for numels in ([1, 0, 100, 16, 0, 0, 17, 1, 0], [5], [0, 40], [1] * 37):
        sources = [torch.arange(float(n)) + 1 for n in numels]
        buffer = torch.full((sum(numels) + 2,), -1.0)
        publish(list(buffer[1:-1].split(numels)), sources, block=16)
        assert torch.equal(buffer[1:-1], torch.cat(sources))
        assert buffer[0] == buffer[-1] == -1
