"""gather, interpreted, against plain torch: whole units out of the heaps of other processes."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from support.kernel_heaps import numbers, same_bits, shared, skew
from support.kernel_references import gather_reference
from support.on_ranks import on_interpreted_ranks

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16

#: Shape of each parameter's shard and its sharded dimension: matrices, a bias, one element, dimensions in the middle.
SHARDS = [((4, 33), 0), ((7,), 0), ((1,), 0), ((5, 8), 1), ((2, 3, 9), 1), ((4, 0), 0)]


def unit(world: int, dtypes: list[torch.dtype]) -> list[torch.Tensor]:
    """Unsharded parameters, to be filled."""
    outs = []
    for (shape, dim), dtype in zip(SHARDS, dtypes, strict=True):
        whole = [size * world if i == dim else size for i, size in enumerate(shape)]
        outs.append(torch.full(whole, -1.0, dtype=dtype))
    return outs


def layout(dtypes: list[torch.dtype]) -> list[int]:
    """Byte offset of each shard, 16-byte aligned as units are laid out."""
    offsets, end = [], 0
    for (shape, _), dtype in zip(SHARDS, dtypes, strict=True):
        offsets.append(end)
        end += -(-torch.Size(shape).numel() * dtype.itemsize // 16) * 16
    return offsets


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("own", "published"),
    [
        ([F32] * 6, None),
        ([BF16, F32, F32, BF16, F64, BF16], None),
        ([BF16] * 6, F32),
        ([F32] * 6, F16),
    ],
    ids=["fp32", "mixed", "fp32_to_bf16", "fp16_to_fp32"],
)
@on_interpreted_ranks()
def test_units_of_peers(rank: int, world: int, own: list[torch.dtype], published: torch.dtype | None) -> None:
    from odc.kernels import gather

    draw, dims = random.Random(rank), [dim for _, dim in SHARDS]
    theirs = own if published is None else [published] * len(SHARDS)
    offsets = layout(theirs)
    with shared(f"gather-{own[0]}-{published}-{world}", rank, world, 8192) as heaps:
        for (shape, _), dtype, offset in zip(SHARDS, theirs, offsets, strict=True):
            count = torch.Size(shape).numel()
            start = offset // dtype.itemsize
            heaps.memory(rank, dtype)[start : start + count] = numbers(1000 * rank + offset, count, dtype)
        dist.barrier()
        peers = [heaps.memory(r) for r in range(world)]
        for first in range(world + 1):
            skew(draw)
            outs, expected = unit(world, own), unit(world, own)
            block = draw.choice([16, 64, None])
            gather(outs, offsets, heaps.table, dims=dims, dtype=published, first=first, block=block)
            gather_reference(expected, offsets, peers, dims=dims, dtype=published)
            assert not any((one == -1).any() for one in expected)
            wrong = [i for i, (a, b) in enumerate(zip(outs, expected, strict=True)) if not same_bits(a, b)]
            assert not wrong, f"parameters {wrong} with blocks of {block}"
        dist.barrier()


@on_interpreted_ranks(1)
def test_some_owners_at_a_time(rank: int, world: int) -> None:
    """A plan serves one gather after another, from any run of owners; the others' parts stay as they are."""
    from odc.kernels import GatherPlan, fixed_rows

    shards, numels = 4, [50, 1, 7]
    offsets = [0, 208, 224]
    owners = [numbers(shard, 80, F32) for shard in range(shards)]
    table = torch.tensor([owner.data_ptr() for owner in owners])
    blank = [torch.full((shards * n,), -1.0) for n in numels]
    plan = GatherPlan(blank, offsets, shards, torch.device("cpu"), block=16, make_rows=fixed_rows)
    for first, count in ((0, 4), (3, 1), (2, 3), (1, 0)):
        outs = [one.clone() for one in blank]
        plan.run([out.data_ptr() for out in outs], table, first, count, programs=3)
        for n, offset, out in zip(numels, offsets, outs, strict=True):
            for shard in range(shards):
                filled = (shard - first) % shards < count
                part = owners[shard][offset // 4 : offset // 4 + n] if filled else blank[0][:n]
                assert same_bits(out[shard * n : (shard + 1) * n], part), f"{count} owners from {first}: shard {shard}"


@on_interpreted_ranks(1)
def test_bad_calls_are_refused(rank: int, world: int) -> None:
    from odc.kernels import gather

    table = torch.tensor([0, 0])
    with pytest.raises(ValueError, match=r"shape \(3, 4\) does not divide into 2 shards along 0"):
        gather([torch.zeros(3, 4)], [0], table)
    with pytest.raises(ValueError, match="share a dtype"):
        gather([torch.zeros(2), torch.zeros(2, dtype=BF16)], [0, 16], table, dtype=F16)
    with pytest.raises(ValueError, match="zip"):
        gather([torch.zeros(2)], [0, 16], table)
    gather([], [], table)
