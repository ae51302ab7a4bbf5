"""Meshes whose ranks do not rise: shards follow torch's process groups, not places in the mesh."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.compare import differences, own_chunk
from support.exact import Exact, batch, train
from support.host_ranks import HostPools
from support.on_ranks import on_ranks
from support.ranks import Pools
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import odc
from odc import Settings, fully_shard
from odc.errors import UnsupportedError
from odc.fsdp import root_of
from odc.handover import Reader, weight_handle

Ranks = Sequence[Any]  # of a mesh: int by place, in 2-D a sequence for each replica

SETTINGS = Settings(timeout_s=60.0)
ORDERS = [list(order) for order in itertools.permutations(range(3))]
# Under FSDP2 the ranks of one place in each replica hold the same shard.
GRIDS = [[[1, 0], [3, 2]], [[3, 2], [1, 0]], [[2, 3], [0, 1]], [[2, 0], [3, 1]], [[0, 3], [1, 2]]]
# They do not: FSDP2 adds up gradients of different shards.
CROSSED = [[[1, 0], [2, 3]], [[0, 3], [2, 1]]]
# Not every supported torch can leave them unsorted.
keeps_order = pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters,
    reason=f"torch {torch.__version__} sorts the ranks of every process group",
)


def mesh_over(ranks: Ranks) -> DeviceMesh:
    mesh = torch.tensor(ranks)
    return DeviceMesh("cpu", mesh, mesh_dim_names=("replicate", "shard")[2 - mesh.ndim :])


def counts_of(world: int) -> list[list[int]]:
    """Unequal, and of one rank none."""
    return [[(rank + step) % 3 for rank in range(world)] for step in range(3)]


def same_as_fsdp2(rank: int, world: int, mesh: DeviceMesh, marks: str) -> None:
    counts = counts_of(world) if marks != "each" else [[1] * world] * 2
    ours = train(fully_shard, rank, counts, marks, mesh=mesh, settings=SETTINGS)
    wrong = differences(ours, train(torch_fully_shard, rank, counts, marks, mesh=mesh), None)
    assert not wrong, "\n".join(wrong)


def same(rank: int, world: int, ranks: Ranks, marks: str) -> None:
    same_as_fsdp2(rank, world, mesh_over(ranks), marks)


def same_as_over_a_rising_mesh(rank: int, world: int, ranks: Ranks) -> None:
    """Whole gradients and parameters; and a rank's own shard is the one that torch gave it."""
    mesh = mesh_over(ranks)
    found = train(fully_shard, rank, counts_of(world), mesh=mesh, settings=SETTINGS)
    theirs = train(torch_fully_shard, rank, counts_of(world), mesh=init_device_mesh("cpu", (world,)))
    for name, whole in found.items():
        if f"{name}, own shard" in found:
            assert whole is not None
            theirs[f"{name}, own shard"] = own_chunk(whole, mesh.get_group(1).rank(), mesh.size(1))
    wrong = differences(found, theirs, None)
    assert not wrong, "\n".join(wrong)


QUICK = [[1, 2, 0], [2, 1, 0], [[1, 0], [3, 2]], [[0, 3], [1, 2]], [[1, 0], [2, 3]]]


def each(meshes: Sequence[Ranks]) -> pytest.MarkDecorator:
    marks = {True: (), False: pytest.mark.thorough}
    return pytest.mark.parametrize(
        "ranks_of_mesh", [pytest.param(one, marks=marks[one in QUICK], id=str(one)) for one in meshes]
    )


@each([*ORDERS, *GRIDS])
def test_ranks_in_any_order(ranks: Pools, ranks_of_mesh: Ranks) -> None:
    ranks(torch.tensor(ranks_of_mesh).numel()).run(same, ranks_of_mesh, "none")


@each(CROSSED)
def test_replicas_whose_ranks_of_one_place_hold_different_shards(ranks: Pools, ranks_of_mesh: Ranks) -> None:
    ranks(4).run(same_as_over_a_rising_mesh, ranks_of_mesh)


def test_an_unchanged_loop(ranks: Pools) -> None:
    ranks(3).run(same, [2, 0, 1], "each")
    ranks(4).run(same, [[3, 2], [1, 0]], "each")


@pytest.mark.parametrize(
    "ranks_of_mesh",
    [[3, 0, 2, 1], [[3, 2], [1, 0]], pytest.param([[2, 3], [0, 1]], marks=pytest.mark.thorough)],
    ids=str,
)
def test_over_hosts(host_ranks: HostPools, ranks_of_mesh: Ranks) -> None:
    host_ranks(2, 2).run(same, ranks_of_mesh, "last")


def test_crossed_replicas_over_hosts(host_ranks: HostPools) -> None:
    host_ranks(2, 2).run(same_as_over_a_rising_mesh, [[1, 0], [2, 3]])


@on_ranks(3)
def test_two_roots_on_the_same_ranks_in_other_orders(rank: int, world: int) -> None:
    """Two roots on meshes of the same ranks are two heaps, and a reader gets the weights of either."""
    models: list[Any] = [
        fully_shard(Exact(), mesh=mesh_over(order), settings=SETTINGS) for order in ([0, 1, 2], [2, 1, 0])
    ]
    reference = Exact()
    for step in range(2):
        with odc.minibatch(*models):
            for model in models:
                model(batch(rank, step, 0)).sum().backward()
        for other in range(world):
            (reference(batch(other, step, 0)).sum() / world).backward()
    for model in models:
        for (name, p), like in zip(model.named_parameters(), reference.parameters(), strict=True):
            if like.grad is not None:
                torch.testing.assert_close(p.grad.full_tensor(), like.grad, msg=name)
        with Reader(weight_handle(model)) as source:
            read = source.read().tensors
        wrong = differences(read, reference.state_dict(), None)
        assert not wrong, "\n".join(wrong)
    assert root_of(models[0]).identity != root_of(models[1]).identity
    dist.barrier()


# groups that torch did not sort --------------------------------------------------------------------------------------


@keeps_order
@on_ranks(3)
def test_a_group_that_keeps_its_order(rank: int, world: int) -> None:
    group: Any = dist.new_group([2, 0, 1], sort_ranks=False)
    same_as_fsdp2(rank, world, DeviceMesh.from_group(group, "cpu"), "none")


@keeps_order
@on_ranks(4)
def test_groups_of_replicas_that_keep_their_order_are_refused(rank: int, world: int) -> None:
    shards: list[Any] = [dist.new_group(some, sort_ranks=False) for some in ([1, 0], [3, 2])]
    replicas: list[Any] = [dist.new_group(some) for some in ([1, 3], [0, 2])]
    mine = [replicas[1 - rank % 2], shards[rank // 2]]
    mesh = DeviceMesh.from_group(mine, "cpu", [[1, 0], [3, 2]], mesh_dim_names=("replicate", "shard"))
    model = fully_shard(Exact(), mesh=mesh, settings=SETTINGS)
    with pytest.raises(UnsupportedError, match=f"rank {rank} has shard {1 - rank % 2} in a process group of ranks"):
        model(batch(rank, 0, 0))
