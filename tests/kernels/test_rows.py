"""The table by which a launch finds what each of its programs works on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from _ranks import RankPool

Pools = Callable[[int], RankPool]


def makes_tables(rank: int, world: int) -> None:
    from odc.kernels.rows import row_table

    table = row_table([2, 0, 3], [(7, 8), (5, 6), (3, 4)], torch.device("cpu"))
    assert table.dtype == torch.int64
    assert table.tolist() == [[0, 7, 8], [2, 5, 6], [2, 3, 4], [5, 0, 0]]
    assert row_table([], [], torch.device("cpu")).numel() == 1


def finds_rows(rank: int, world: int) -> None:
    """Rows of one program, of many and of none; every element is copied once, nothing else is touched."""
    from odc.kernels import publish

    numels = [1, 0, 100, 16, 0, 0, 17, 1, 0]
    sources = [torch.arange(float(n)) + 1 for n in numels]
    buffer = torch.full((sum(numels) + 2,), -1.0)
    places = list(buffer[1:-1].split(numels))
    publish(places, sources, block=16)
    assert torch.equal(buffer[1:-1], torch.cat(sources))
    assert buffer[0] == buffer[-1] == -1


def test_tables(interpreted: Pools) -> None:
    interpreted(1).run(makes_tables)


def test_every_program_finds_its_row(interpreted: Pools) -> None:
    interpreted(1).run(finds_rows)
