"""The ways of a copy on a device, with memory files in its place and kernels interpreted: each moves its bytes."""

from __future__ import annotations

import ctypes

import torch
import torch.distributed as dist

from odc.bench import heaps
from odc.bench.ranks import let_go

NUMEL, PIECES = 1024, 3


def moves(rank: int, world: int) -> dict[str, list[str]]:
    """Names of the ways that were tried, for get, put and add."""
    from odc.movers import driver

    driver.copy = ctypes.memmove  # type: ignore[assignment]
    heap = heaps.open_heap(4 * NUMEL * PIECES, "cpu")
    region, follower = heap.tensor(rank, "data", torch.float32), (rank + 1) % world
    peers = heap.tensor(follower, "data", torch.float32).split(NUMEL)
    mine = torch.empty(PIECES * NUMEL).split(NUMEL)
    values = torch.arange(PIECES * NUMEL, dtype=torch.float32)
    gets, puts = heaps._device_gets(heap, mine, peers), heaps._device_puts(heap, mine, peers)
    region.copy_(values + 10 * rank)
    dist.barrier()
    for name, way in gets.items():
        for i in range(PIECES):
            mine[i].fill_(-1)
            way(i)
            assert torch.equal(mine[i], values.split(NUMEL)[i] + 10 * follower), name
    dist.barrier()
    for i in range(PIECES):
        mine[i].copy_(values.split(NUMEL)[i] - rank)
    for name, way in puts.items():
        region.zero_()
        dist.barrier()
        for i in range(PIECES):
            way(i)
        dist.barrier()
        assert torch.equal(region, values - (rank - 1) % world), name
        dist.barrier()
    adds = {}
    for dtype in (torch.float32, torch.bfloat16):
        ones = [torch.full((NUMEL,), i + 1.0, dtype=dtype) for i in range(PIECES)]
        adds = heaps._device_adds("", ones, peers)
        for name, way in adds.items():
            region.copy_(values)
            dist.barrier()
            for i in range(PIECES):
                way(i)
            dist.barrier()
            assert torch.equal(region, values + torch.cat(ones).float()), f"{name} of {dtype}"
            dist.barrier()
    let_go()
    return {"get": list(gets), "put": list(puts), "add": list(adds)}


def test_every_way_moves_its_bytes(interpreted) -> None:
    for tried in interpreted(2).run(moves):
        assert [len(ways) for ways in tried.values()] == [4, 3, 2]


def test_a_device_copies_from_memory_that_no_cache_holds() -> None:
    mib = 1 << 20
    spans = {size: heaps._times(size, "cuda") * size for size in (mib, 16 * mib, 64 * mib, 256 * mib)}
    assert set(spans.values()) == {256 * mib}
    assert heaps._times(64 << 10, "cuda") == 256, "no more launches than fit its queue"
    assert [heaps._times(size, "cpu") for size in (64 << 10, mib, 256 * mib)] == [16, 1, 1]
