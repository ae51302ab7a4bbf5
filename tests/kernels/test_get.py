"""get, interpreted, against plain torch: slices of heaps that other processes write."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from support.kernel_heaps import numbers, same_bits, shared, skew
from support.kernel_references import get_reference
from support.on_ranks import on_interpreted_ranks

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize("own", [F32, BF16], ids=str)
@pytest.mark.parametrize("theirs", [F32, BF16], ids=str)
@on_interpreted_ranks(2)
def test_slices_of_peers_with_conversion(rank: int, world: int, own: torch.dtype, theirs: torch.dtype) -> None:
    from odc.kernels import get

    draw = random.Random(rank)
    with shared(f"get-{own}-{theirs}", rank, world, 16384) as heaps:
        mine = heaps.memory(rank, theirs)
        mine.copy_(numbers(rank, mine.numel(), theirs))
        dist.barrier()
        for _ in range(8):
            skew(draw)
            peer, first = draw.randrange(world), draw.randrange(500)
            out = torch.full((draw.choice([1, 7, 64, 333, 1000]),), -1.0, dtype=own)
            expected = out.clone()
            offset = first * theirs.itemsize
            get(out, heaps.table, peer, offset, dtype=theirs, block=draw.choice([64, 256]))
            get_reference(expected, [heaps.memory(r) for r in range(world)], peer, offset, dtype=theirs)
            assert same_bits(out, expected), f"{out.numel()} elements from {first} of rank {peer}"
        dist.barrier()


@on_interpreted_ranks(1)
def test_bad_calls_are_refused(rank: int, world: int) -> None:
    from odc.errors import UnsupportedError
    from odc.kernels import get
    from odc.kernels.nvshmem import Symmetric

    table, out = torch.tensor([0, 0]), torch.zeros(4)
    with pytest.raises(ValueError, match="pointer table is int64"):
        get(out, table.int(), 0)
    with pytest.raises(ValueError, match="destination 0 is not contiguous"):
        get(torch.zeros(4, 4).t(), table, 0)
    with pytest.raises(UnsupportedError, match=r"float8.* can only be copied"):
        get(out, table, 0, dtype=torch.float8_e4m3fn)
    with pytest.raises(UnsupportedError, match="cannot be converted on the way"):
        get(out.bfloat16(), table, 0, dtype=F32, symmetric=Symmetric(0, torch.zeros(2, dtype=torch.int32)))
    get(out[:0], table, 0)  # nothing to do: no address is read
