"""accumulate, interpreted, against plain torch: several processes add into each other's accumulators at once."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from support.kernel_heaps import numbers, same_bits, shared, skew, whole_numbers
from support.kernel_references import accumulate_reference
from support.on_ranks import on_interpreted_ranks

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
SHARDS = [40, 1, 133]  # elements of a shard, by parameter
OFFSETS = [0, 40, 44]
ROUNDS = 10


def gradients_of(source: int, round_: int, world: int, dtypes: list[torch.dtype]) -> list[torch.Tensor]:
    """Whole numbers, the last shards of a parameter short or empty."""
    short = [0, world - 1, 5]
    return [
        whole_numbers(100 * source + round_, shard * world - less, dtype)
        for shard, less, dtype in zip(SHARDS, short, dtypes, strict=True)
    ]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("dtypes", "accumulator"),
    [([F32] * 3, F32), ([F32] * 3, F64), ([BF16, F32, F16], F32)],
    ids=["fp32", "fp64", "mixed"],
)
@on_interpreted_ranks()
def test_no_addition_is_lost(rank: int, world: int, dtypes: list[torch.dtype], accumulator: torch.dtype) -> None:
    from odc.kernels import accumulate

    draw = random.Random(rank)
    with shared(f"accumulate-{accumulator}-{dtypes[0]}-{world}", rank, world, 4096) as heaps:
        dist.barrier()
        for i in range(ROUNDS):
            skew(draw)
            accumulate(
                gradients_of(rank, i, world, dtypes),
                *(SHARDS, OFFSETS, heaps.table),
                dtype=accumulator,
                first=rank,
                block=draw.choice([32, 128]),
            )
        dist.barrier()
        expected = [torch.zeros_like(heaps.memory(0, accumulator)) for _ in range(world)]
        for source in range(world):
            for i in range(ROUNDS):
                accumulate_reference(gradients_of(source, i, world, dtypes), SHARDS, OFFSETS, expected)
        assert expected[rank].any()
        assert same_bits(heaps.memory(rank, accumulator), expected[rank]), "an addition was lost or went astray"
        dist.barrier()


@on_interpreted_ranks(1)
def test_sums_have_torchs_bits(rank: int, world: int) -> None:
    from odc.kernels import accumulate

    for source in (F32, BF16, F16):
        gradients = [numbers(1, 300, source), numbers(2, 8, source)]
        sums = [numbers(3, 200, F32), numbers(4, 200, F32)]
        expected = [one.clone() for one in sums]
        table = torch.tensor([one.data_ptr() for one in sums])
        for _ in range(3):
            accumulate(gradients, [150, 4], [0, 170], table)
            accumulate_reference(gradients, [150, 4], [0, 170], expected)
        assert all(map(same_bits, sums, expected)), str(source)


@on_interpreted_ranks(1)
def test_slots_hold_gradients_and_zeros(rank: int, world: int) -> None:
    """A unit's gradients to every owner's slot; what a gradient is short of whole shards is zeros there."""
    from odc.kernels import ScatterPlan

    owners, room = 3, 400
    for dtype in (F32, BF16):
        for block in (16, 64, None):
            gradients = gradients_of(7, 1, owners, [dtype] * 3)
            expected, slots = (torch.full((owners, room), 7.0, dtype=dtype) for _ in range(2))
            for owner in range(owners):
                for gradient, shard, offset in zip(gradients, SHARDS, OFFSETS, strict=True):
                    part = gradient[owner * shard : (owner + 1) * shard]
                    expected[owner, offset : offset + shard] = 0
                    expected[owner, offset : offset + part.numel()] = part
            table = torch.tensor([slot.data_ptr() for slot in slots])
            numels, addresses = zip(*((gradient.numel(), gradient.data_ptr()) for gradient in gradients), strict=True)
            plan = ScatterPlan(numels, SHARDS, OFFSETS, dtype, owners, torch.device("cpu"), block=block)
            plan.run(addresses, table, 1, owners)
            assert same_bits(slots, expected), f"{dtype}, blocks of {block}"
            slots.fill_(7.0)
            plan.run(addresses, table, 2, 2, programs=3)  # not to owner 1
            expected[1] = 7.0
            assert same_bits(slots, expected), f"{dtype}, blocks of {block}, two owners"


@on_interpreted_ranks(1)
def test_half_accumulators_are_refused(rank: int, world: int) -> None:
    from odc.errors import UnsupportedError
    from odc.kernels import accumulate

    total = torch.zeros(4)
    for dtype in (F16, BF16):
        with pytest.raises(UnsupportedError, match=f"accumulated in fp32 or fp64, not in {dtype}"):
            accumulate([torch.ones(4)], [4], [0], torch.tensor([total.data_ptr()]), dtype=dtype)
    with pytest.raises(ValueError, match="gradient 0 is not contiguous"):
        accumulate([torch.ones(4, 4)[:, 1]], [4], [0], torch.tensor([total.data_ptr()]))
    assert not total.any()
