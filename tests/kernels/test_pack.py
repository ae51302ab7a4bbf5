"""pack, interpreted, against plain torch: runs of rows of any lengths, into heaps of other processes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_heaps import same_bits, shared, skew
from support.ranks import RankPool

Pools = Callable[[int], RankPool]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8]


def sends_runs(rank: int, world: int) -> None:
    """Every rank packs rows of its own straight into its part of every peer's heap."""
    from odc.kernels import pack, pack_reference

    draw, room = random.Random(rank), 40
    with shared("pack", rank, world, world * room * 12 * 8) as heaps:

        def arena(owner: int, source: int) -> torch.Tensor:
            return heaps.memory(owner, torch.int64).view(world, room, 12)[source]

        def rows_of(source: int) -> torch.Tensor:
            return torch.arange(50 * 12).view(50, 12) + 10_000 * source

        def runs_of(source: int, owner: int) -> tuple[list[int], list[int]]:
            drawn = random.Random(100 * source + owner)
            return [drawn.randrange(40) for _ in range(5)], [drawn.randrange(8) for _ in range(5)]

        for owner in draw.sample(range(world), world):
            skew(draw)
            starts, lengths = runs_of(rank, owner)
            written = pack(rows_of(rank), starts, lengths, arena(owner, rank), block=draw.choice([16, 64, None]))
            assert written == sum(lengths)
        dist.barrier()
        for source in range(world):
            expected = torch.zeros(room, 12, dtype=torch.int64)
            pack_reference(rows_of(source), *runs_of(source, rank), expected)
            assert same_bits(arena(rank, source), expected), f"from rank {source}"
        dist.barrier()


def any_runs(rank: int, world: int) -> None:
    from odc.kernels import pack, pack_reference

    @settings(max_examples=40, deadline=None)
    @given(st.sampled_from(DTYPES), st.integers(0, 30), st.sampled_from([(), (3,), (2, 5)]), st.data())
    def property_(dtype: torch.dtype, count: int, trailing: tuple[int, ...], data: st.DataObject) -> None:
        rows = torch.randint(0, 2, (count, *trailing)).to(dtype)
        starts = data.draw(st.lists(st.integers(0, count), max_size=6))
        lengths = [data.draw(st.integers(0, count - start)) for start in starts]
        out, expected = (torch.zeros((sum(lengths) + 1, *trailing), dtype=dtype) for _ in range(2))
        assert pack(rows, starts, lengths, out, block=16) == pack_reference(rows, starts, lengths, expected)
        assert same_bits(out, expected)

    property_()


def refuses_what_does_not_fit(rank: int, world: int) -> None:
    from odc.kernels import pack

    rows, out = torch.zeros(10, 3), torch.zeros(4, 3)
    with pytest.raises(ValueError, match="2 runs take 6 packed rows; there is room for 4"):
        pack(rows, [0, 5], [3, 3], out)
    for starts, lengths in [([8], [3]), ([-1], [2]), ([3], [-1])]:
        with pytest.raises(ValueError, match="is not within 10 rows"):
            pack(rows, starts, lengths, out)
    with pytest.raises(ValueError, match="not alike"):
        pack(rows, [0], [1], torch.zeros(4, 2))
    assert pack(rows, [], [], out) == 0


def test_runs_are_sent_to_peers(interpreted: Pools) -> None:
    interpreted(2).run(sends_runs)


def test_any_runs(interpreted: Pools) -> None:
    interpreted(1).run(any_runs)


def test_what_does_not_fit_is_refused(interpreted: Pools) -> None:
    interpreted(1).run(refuses_what_does_not_fit)
