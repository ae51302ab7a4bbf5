"""add, interpreted, against plain torch: an owner adds what other processes have put into its slots."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from support.kernel_heaps import numbers, same_bits, shared, skew
from support.kernel_references import add_reference
from support.on_ranks import on_interpreted_ranks
from support.waiting import until

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
ELEMENTS, SLOT = 200, 1024


@pytest.mark.parametrize("accumulator", [F32, F64], ids=str)
@on_interpreted_ranks(2)
def test_owner_adds_what_was_put(rank: int, world: int, accumulator: torch.dtype) -> None:
    """Slots hold blocks of different dtypes; places follow each other and lie askew."""
    from odc.kernels import add

    draw = random.Random(rank)
    kinds = [F32, BF16, F16]
    with shared(f"add-{accumulator}", rank, world, world * SLOT) as heaps:
        total = numbers(rank, ELEMENTS, accumulator)
        expected = total.clone()
        for i in range(4):
            for owner in range(world):
                skew(draw)
                first = rank * SLOT
                kind = kinds[(rank + i) % 3]
                start = first // kind.itemsize
                heaps.memory(owner, kind)[start : start + 150] = numbers(100 * rank + i, 150, kind)
            dist.barrier()
            places, again, values = [], [], []
            for source in range(world):
                kind = kinds[(source + i) % 3]
                block = heaps.memory(rank, kind)[source * SLOT // kind.itemsize :][:150]
                values += [block[:33], block[33:150]]
                places += [total[source : source + 33], total[source + 33 : source + 150]]
                again += [expected[source : source + 33], expected[source + 33 : source + 150]]
            for source in range(world):  # one source at a time: the places of two overlap
                part = slice(2 * source, 2 * source + 2)
                add(places[part], values[part], block=draw.choice([16, None]))
                add_reference(again[part], values[part])
            assert same_bits(total, expected), f"round {i}"
            dist.barrier()


@pytest.mark.parametrize("world", [2, 3])
@on_interpreted_ranks()
def test_staged_push(rank: int, world: int) -> None:
    """Put into a slot and signal; the owner waits, adds and returns the slot, ranks out of step."""
    from odc.kernels import Signal, add, put

    draw, rounds, to = random.Random(rank), 6, (rank + 1) % world
    source, arrived = (rank - 1) % world, torch.zeros(1, dtype=torch.int32)
    total, expected = torch.zeros(ELEMENTS), torch.zeros(ELEMENTS)
    with shared("staged", rank, world, SLOT) as heaps:
        word = SLOT // 8 - 1  # the last of the region: the number of the put that has arrived
        region = heaps.memory(rank, torch.int64)
        dist.barrier()
        for i in range(1, rounds + 1):
            skew(draw)
            until(lambda i=i: heaps.words(to).load(0) >= i - 1, f"rank {to} to free the slot")
            gradient = [numbers(10 * rank + i, 40, BF16), numbers(-10 * rank - i, 60, BF16)]
            put(gradient, heaps.table, to, signal=Signal(8 * word, i, arrived), block=16)
            skew(draw)
            until(lambda i=i: int(region[word]) >= i, f"rank {source} to push")
            add([total[50:150]], [heaps.memory(rank, BF16)[:100]])
            heaps.words(rank).store(0, i)
            pushed = [numbers(10 * source + i, 40, BF16), numbers(-10 * source - i, 60, BF16)]
            expected[50:150] += torch.cat(pushed).float()
            assert same_bits(total, expected), f"round {i}"
        dist.barrier()


@on_interpreted_ranks(1)
def test_sources_are_added_in_one_go(rank: int, world: int) -> None:
    """Each place with as many values as it has, in their order: the bits of as many adds, one source askew."""
    from odc.kernels import AddPlan

    room = numbers(1, 5000, F32)
    for to in (F32, F64):
        for block in (16, 64, None):
            totals, expected = ([numbers(2, n, to) for n in (1200, 17, 40)] for _ in range(2))
            values = [
                [numbers(i, 1200, F32) for i in range(5)],
                [numbers(9, 17, BF16)],
                [room[:40], room[1:41], room[4:44]],
            ]
            AddPlan(totals, values, block=block).run()
            for total, sources in zip(expected, values, strict=True):
                for source in sources:
                    add_reference([total], [source])
            assert all(map(same_bits, totals, expected)), f"{to}, blocks of {block}"


@on_interpreted_ranks(1)
def test_half_accumulators_are_refused(rank: int, world: int) -> None:
    from odc.errors import UnsupportedError
    from odc.kernels import AddPlan, add

    for dtype in (F16, BF16):
        with pytest.raises(UnsupportedError, match="fp32 or fp64"):
            add([torch.zeros(4, dtype=dtype)], [torch.ones(4)])
    with pytest.raises(ValueError, match="4 elements are needed; these are 3 elements of torch.float32"):
        add([torch.zeros(4)], [torch.ones(3)])
    with pytest.raises(ValueError, match="4 elements of torch.float32, 4 elements of torch.bfloat16"):
        AddPlan([torch.zeros(4)], [[torch.ones(4), torch.ones(4, dtype=BF16)]])
