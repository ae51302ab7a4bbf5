"""unpack, interpreted, against plain torch: the inverse of pack, out of heaps that other processes packed into."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from support.kernel_heaps import numbers, same_bits, shared, skew
from support.ranks import RankPool

Pools = Callable[[int], RankPool]
BF16 = torch.bfloat16


def cut(draw: random.Random, count: int) -> tuple[list[int], list[int]]:
    """Runs that cover `count` rows, shuffled."""
    marks = sorted({0, count, *(draw.randrange(count) for _ in range(6))})
    runs = [(a, b - a) for a, b in pairwise(marks)]
    draw.shuffle(runs)
    return [start for start, _ in runs], [length for _, length in runs]


def gets_back_what_was_packed(rank: int, world: int) -> None:
    """Every rank packs its rows into the next rank's heap and unpacks what it was sent."""
    from odc.kernels import pack, unpack, unpack_reference

    count, width = 60, 5
    draw = random.Random(rank)
    with shared("unpack", rank, world, count * width * 2) as heaps:

        def packed(owner: int) -> torch.Tensor:
            return heaps.memory(owner, BF16).view(count, width)

        def rows_of(source: int, i: int) -> torch.Tensor:
            return numbers(10 * source + i, count * width, BF16).view(count, width)

        for i in range(4):
            skew(draw)
            starts, lengths = cut(random.Random(10 * rank + i), count)
            pack(rows_of(rank, i), starts, lengths, packed((rank + 1) % world), block=16)
            dist.barrier()
            skew(draw)
            source = (rank - 1) % world
            starts, lengths = cut(random.Random(10 * source + i), count)
            rows, expected = torch.zeros(count, width, dtype=BF16), torch.zeros(count, width, dtype=BF16)
            assert unpack(packed(rank), starts, lengths, rows, block=draw.choice([16, None])) == count
            unpack_reference(packed(rank), starts, lengths, expected)
            assert same_bits(rows, expected) and same_bits(rows, rows_of(source, i)), f"round {i}"
            dist.barrier()


def leaves_other_rows_alone(rank: int, world: int) -> None:
    from odc.kernels import unpack

    rows = torch.full((6, 2), -1.0)
    assert unpack(torch.arange(8.0).view(4, 2), [4, 0], [1, 2], rows) == 3
    assert rows.tolist() == [[2, 3], [4, 5], [-1, -1], [-1, -1], [0, 1], [-1, -1]]
    with pytest.raises(ValueError, match="1 runs take 5 packed rows; there is room for 4"):
        unpack(torch.zeros(4, 2), [0], [5], rows)


def test_gets_back_what_was_packed(interpreted: Pools) -> None:
    interpreted(2).run(gets_back_what_was_packed)


def test_other_rows_stay(interpreted: Pools) -> None:
    interpreted(1).run(leaves_other_rows_alone)
