"""The queue of microbatches over hosts: each microbatch is computed once, and gradients are those of FSDP2."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch.distributed as dist
from support.exact import Exact, await_sums_in_backward, batch, claimed
from support.host_ranks import HostPools
from support.on_ranks import on_hosts
from torch.distributed.device_mesh import init_device_mesh

from odc import Settings, fully_shard
from odc.fsdp import root_of
from odc.protocol import queue


def claimed_over_hosts(rank: int, world: int, counts: tuple[tuple[int, ...], ...], hybrid: bool) -> list[list[int]]:
    shape, names = ((2, world // 2), ("hosts", "ranks")) if hybrid else ((world,), ("ranks",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    with mock.patch.object(queue, "_TABLE_BYTES", 64):  # what is in it takes two reads
        return claimed(rank, counts, mesh, mesh, Settings(timeout_s=60.0, queue_bytes=1 << 16))


@pytest.mark.parametrize(
    ("hosts", "per_host", "hybrid"),
    [(2, 2, False), *(pytest.param(*c, marks=pytest.mark.thorough) for c in ((3, 1, False), (2, 2, True)))],
)
def test_a_queue_over_hosts_gives_each_microbatch_once(
    host_ranks: HostPools, hosts: int, per_host: int, hybrid: bool
) -> None:
    """Its home is on one of them."""
    world = hosts * per_host
    counts = tuple(tuple(row[rank % 4] for rank in range(world)) for row in ((1, 6, 0, 3), (0, 0, 5, 0)))
    found = host_ranks(hosts, per_host).run(claimed_over_hosts, counts, hybrid)
    for step, row in enumerate(counts):
        assert sorted(number for numbers in found for number in numbers[step]) == list(range(sum(row)))


@on_hosts(2, 2)
def test_sums_cross_in_a_backward_after_which_the_queue_has_no_other(rank: int, world: int) -> None:
    """Each claims one microbatch, and no other is left when its backward begins; home is on one of the hosts."""
    settings = Settings(timeout_s=60.0, queue_bytes=1 << 16)
    model = Exact()
    for layer in model.layers:
        fully_shard(layer, settings=settings)
    fully_shard(model, settings=settings)
    waited = await_sums_in_backward(model)
    member = root_of(model).member
    assert member.queue is not None
    for step in range(2):
        with model.minibatch():
            claims = model.claim([{"x": batch(rank, step, 0)}])
            for microbatch in claims:
                loss = model(microbatch["x"]).sum()
                while member.heaps.claims() < world:
                    time.sleep(0.002)
                assert member.queue.in_last()
                loss.backward()
            assert not member.queue.in_last(), "its end was seen"
    assert waited == [1, 2]


@on_hosts(2, 2)
def test_what_is_left_in_the_queue_may_follow(rank: int, world: int) -> None:
    """As long as something is left no rank knows which backward is the last."""
    settings = Settings(timeout_s=60.0, queue_bytes=1 << 16)
    model = Exact()
    fully_shard(model, settings=settings)
    member = root_of(model).member
    assert member.queue is not None
    with model.minibatch():
        claims = model.claim([{"x": batch(rank, 0, i)} for i in range(2)])
        first = next(claims)
        dist.barrier()  # each has claimed one, of two for each
        assert not member.queue.in_last()
        dist.barrier()
        for microbatch in (first, *claims):
            model(microbatch["x"]).sum().backward()
