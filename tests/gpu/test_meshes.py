"""Roots that ranks run in orders of their own, and meshes over which torch has no process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.compare import differences
from support.device import own_device
from support.exact import Exact, batch, train
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import odc
from odc import Settings, fully_shard
from odc.fsdp import live_roots

SETTINGS = Settings(timeout_s=120.0, copy_engine_bytes=1)  # by the copy engine, as pieces of large models go


def leave() -> None:
    for root in live_roots():
        root.shut_down()


def in_another_order(rank: int, world: int) -> list[list[torch.Tensor]]:
    """Gradients of three models, of which each rank runs another one first."""
    device = own_device(rank)
    mesh = init_device_mesh("cuda", (world,))
    models: list[Any] = [fully_shard(Exact().to(device), mesh=mesh, settings=SETTINGS) for _ in range(3)]
    order = [(rank + turn) % len(models) for turn in range(len(models))]
    with odc.minibatch(*models):
        for number in order:
            models[number](batch(rank, number, 0).to(device)).sum().backward()
    found = [[p.grad.to_local().cpu() for p in model.parameters() if p.grad is not None] for model in models]
    leave()
    return found


def test_ranks_run_their_models_first_in_any_order(ranks: Any) -> None:
    world = 3
    found = ranks(world).run(in_another_order, timeout=240)
    for number in range(3):
        whole = Exact()
        for rank in range(world):
            (whole(batch(rank, number, 0)).sum() / world).backward()
        gradients = [parameter.grad for parameter in whole.parameters() if parameter.grad is not None]
        assert len(gradients) > 3
        for at, gradient in enumerate(gradients):
            shards = torch.cat([found[rank][number][at] for rank in range(world)])
            torch.testing.assert_close(shards, gradient)


def over_a_mesh(rank: int, world: int, ranks_of_mesh: list[list[int]]) -> int:
    own_device(rank)
    counts = ((1, 1), (2, 1), (0, 2))
    names = ("replicate", "shard")
    mesh = DeviceMesh("cuda", torch.tensor(ranks_of_mesh), mesh_dim_names=names)
    ours = train(fully_shard, rank, counts, "none", device="cuda", gathered=False, mesh=mesh, settings=SETTINGS)
    leave()
    reference = DeviceMesh("cpu", torch.tensor(ranks_of_mesh), mesh_dim_names=names)
    theirs = train(torch_fully_shard, rank, counts, gathered=False, mesh=reference)
    wrong = differences(ours, theirs, None)
    assert not wrong, "\n".join(wrong)
    return sum(int(one.count_nonzero()) for one in ours.values() if one is not None)


@pytest.mark.parametrize("ranks_of_mesh", [[[1, 0]], [[1], [0]]], ids=str)
def test_a_mesh_needs_no_process_group_of_its_ranks(ranks: Any, ranks_of_mesh: list[list[int]]) -> None:
    """In 2-D torch makes groups of rows and columns, and that of the world has the ranks in another order."""
    assert min(ranks(2).run(over_a_mesh, ranks_of_mesh, timeout=240)) > 500
