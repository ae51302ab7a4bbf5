"""signal, interpreted: words of other processes are set and added to, and no addition is lost."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from support.kernel_heaps import shared, skew
from support.ranks import RankPool

Pools = Callable[[int], RankPool]
ROUNDS = 20


def counts_everything(rank: int, world: int) -> None:
    """Word 0 of every rank is added to by all at once, by kernels and by the host; word 1 + r is set by rank r."""
    from odc.kernels import signal

    draw = random.Random(rank)
    with shared(f"signal-{world}", rank, world, 64) as heaps:
        dist.barrier()
        for i in range(1, ROUNDS + 1):
            skew(draw)
            for peer in range(world):
                signal(heaps.word_table, peer, 0, 1 << 32, add=True)
                heaps.words(peer).add(0, 1)
                signal(heaps.word_table, peer, 8 * (1 + rank), -i)
        dist.barrier()
        assert heaps.words(rank).load(0) == world * ROUNDS * ((1 << 32) + 1)
        assert [heaps.words(rank).load(1 + source) for source in range(world)] == [-ROUNDS] * world


def matches_reference(rank: int, world: int) -> None:
    from odc.kernels import signal, signal_reference

    mine, expected = torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    table = torch.tensor([mine.data_ptr()])
    for offset, value, add in [(0, 1, False), (8, -(1 << 62), False), (8, 5, True), (0, (1 << 63) - 1, True)]:
        signal(table, 0, offset, value, add=add)
        signal_reference([expected], 0, offset, value, add=add)
        assert torch.equal(mine, expected), f"{value} at {offset}"
    with pytest.raises(ValueError, match="none at byte 12"):
        signal(table, 0, 12, 1)


@pytest.mark.parametrize("world", [2, 3])
def test_no_addition_is_lost(interpreted: Pools, world: int) -> None:
    interpreted(world).run(counts_everything)


def test_matches_the_reference(interpreted: Pools) -> None:
    interpreted(1).run(matches_reference)
