"""The heap on CUDA: the conformance suite of all heaps, and what is CUDA's own."""

from __future__ import annotations

import re
import uuid

import torch
import torch.distributed as dist
from support.conformance import HeapConformance, sealed
from support.device import cuda_group

from odc.errors import HeapMemoryError
from odc.movers import driver


class TestCudaHeap(HeapConformance):
    group = staticmethod(cuda_group)


def copies_by_address(rank: int, world: int, identity: str, nbytes: int) -> None:
    """Raw copies, as the staging slots are filled: out of private memory into the next rank's heap."""
    with sealed(cuda_group, identity, rank, world, (("flags", 64), ("large", nbytes))) as heap:
        source = torch.arange(nbytes, dtype=torch.int64, device=heap.device).to(torch.uint8) + rank
        made = heap.lanes.mark()
        with heap.lanes.lane("push"):
            heap.lanes.follow(made)
            driver.copy(heap.address((rank + 1) % world, "large"), source.data_ptr(), nbytes)
            heap.lanes.settle()
        dist.barrier()
        mine = heap.tensor(rank, "large", torch.uint8)
        assert torch.equal(mine, source - rank + (rank - 1) % world), "what was put is not there"
        dist.barrier()


def test_raw_copies_reach_a_peer(ranks) -> None:
    ranks(2).run(copies_by_address, uuid.uuid4().hex[:12], (1 << 20) + 24)


def follows(rank: int, world: int, identity: str) -> None:
    """A mark of one lane holds back another: a long kernel before it, a copy of its result after it."""
    with sealed(cuda_group, identity, rank, world) as heap:
        values = torch.zeros(1 << 24, device=heap.device)
        zeroed = heap.lanes.mark()
        with heap.lanes.lane("push"):
            heap.lanes.follow(zeroed)
            torch.cuda._sleep(200_000_000)
            values.fill_(3.0)
            mark = heap.lanes.mark()
        with heap.lanes.lane("fetch"):
            heap.lanes.follow(mark)
            copy = values.clone()
            heap.lanes.settle()
        assert float(copy.min()) == 3.0, "the copy did not wait for the mark"
        dist.barrier()


def test_lanes_follow_marks(ranks) -> None:
    ranks(2).run(follows, uuid.uuid4().hex[:12])


def asks_too_much(rank: int, world: int, identity: str) -> str:
    with cuda_group(identity, tuple(range(world)), rank, 60.0) as heap:
        heap.allocate("flags", 64, words=True)
        heap.allocate("large", 1 << 44)
        try:
            heap.seal()
        except HeapMemoryError as error:
            return str(error)
        raise AssertionError("16 TiB were had")


def test_too_large_a_heap_is_an_error_with_numbers(ranks) -> None:
    for message in ranks(2).run(asks_too_much, uuid.uuid4().hex[:12]):
        assert re.search(r"needs 16777216\.0 MiB of cuda:\d, which had \d+\.\d MiB free", message), message
