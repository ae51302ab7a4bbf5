"""The queue of microbatches over hosts: each microbatch is computed once, and gradients are those of FSDP2."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.exact import HIDDEN, Exact, await_sums_in_backward, batch
from support.on_ranks import on_hosts
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from odc import Settings, fully_shard
from odc.fsdp import root_of
from odc.protocol import queue

HostPools = Callable[[int, int], Any]


def claimed(rank: int, world: int, counts: tuple[tuple[int, ...], ...], hybrid: bool) -> list[list[int]]:
    """Gradients of what all ranks claim from a queue, beside FSDP2's of what each has loaded; the claims by step."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("hosts", "ranks")) if hybrid else None
    settings = Settings(timeout_s=60.0, queue_bytes=1 << 16)
    ours, theirs, numbers = Exact(), Exact(), list[list[int]]()
    for shard, model in ((functools.partial(fully_shard, settings=settings), ours), (torch_fully_shard, theirs)):
        for layer in model.layers:
            shard(layer, mesh=mesh)
        shard(model, mesh=mesh)
    for step, row in enumerate(counts):
        mine = [{"x": batch(rank, step, i)} for i in range(row[rank])]
        with ours.minibatch(), mock.patch.object(queue, "_TABLE_BYTES", 64):  # what is in it takes two reads
            claims = ours.claim(mine, [float(10 * i + rank) for i in range(row[rank])])
            numbers.append([])
            for microbatch in claims:
                numbers[-1].append(claims.number)
                ours(microbatch["x"]).sum().backward()
        inputs = torch.cat([batch(rank, step, i) for i in range(row[rank])] or [torch.zeros(1, HIDDEN)])
        (theirs(inputs).sum() * float(bool(mine))).backward()
        for one, other in zip(ours.layers.parameters(), theirs.layers.parameters(), strict=True):
            assert torch.equal(one.grad.full_tensor(), other.grad.full_tensor()), f"rank {rank} in step {step}"
        ours.zero_grad()
        theirs.zero_grad()
    return numbers


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
    found = host_ranks(hosts, per_host).run(claimed, counts, hybrid)
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
                while (member.heaps.claims(0) if rank >= world // 2 else member.protocol.claims_at_home()) < world:
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
