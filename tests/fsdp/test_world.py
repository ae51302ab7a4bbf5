"""`optimizer_sharding="world"`: a 2-D mesh whose optimizer is sharded over all ranks trains as FSDP2 over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.compare import assert_same, assert_trained_alike
from support.models import Case, Run, adamw, build, own_parameters, reduced_exactly, train, train_step
from support.ranks import RankPool
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from odc import Settings, fully_shard
from odc.errors import UnsupportedError
from odc.fsdp import root_of

Pools = Callable[[int], RankPool]
ALL = Case(counts=((1, 3, 2, 0), (2, 0, 1, 1), (0, 0, 4, 1)), idiom="minibatch")


@cache
def nodes(count: int, size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (count, size), mesh_dim_names=("replicate", "shard"))


def equal(rank: int, world: int, count: int, case: Case, settings: Settings, exact: bool) -> None:
    """Losses, gradients, norms, and parameters after three steps of AdamW; with clipping, by a torch loop."""
    mesh = nodes(count, world // count)
    run = train(fully_shard, case, rank, world, mesh=mesh, optimizer_sharding="world", settings=settings)
    flat = init_device_mesh("cpu", (world,))
    options = reduced_exactly(case) if exact else {}
    reference = train(torch_fully_shard, case, rank, world, mesh=flat, pad=case.idiom == "minibatch", **options)
    if exact:
        assert_same(run, reference)
    else:
        assert_trained_alike(run, reference, low_precision=case.low_precision)


def test_two_nodes_of_one_rank_to_the_bit(ranks: Pools) -> None:
    """With uneven chunks, empty parts and a rank without microbatches."""
    case = Case(counts=((1, 2), (0, 1), (3, 1)), idiom="minibatch")
    ranks(2).run(equal, 2, case, Settings(reproducible=True, timeout_s=60.0), True)


@pytest.mark.parametrize("accumulate", ["server", pytest.param("direct", marks=pytest.mark.thorough)])
def test_two_nodes_of_two_ranks(ranks: Pools, accumulate: Any) -> None:
    ranks(4).run(equal, 2, ALL, Settings(accumulate=accumulate, timeout_s=60.0), False)


@pytest.mark.thorough
@pytest.mark.parametrize(("world", "count"), [(3, 3), (4, 4), (4, 1)])
def test_other_grids(ranks: Pools, world: int, count: int) -> None:
    case = Case(counts=tuple(row[:world] for row in ALL.counts), idiom="minibatch")
    ranks(world).run(equal, count, case, Settings(second_buffer=True, timeout_s=60.0), False)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case",
    [
        Case(counts=((1, 1, 1, 1),), low_precision=True),
        Case(counts=((1, 1, 1, 1),), tied=True, checkpointing="function"),
        Case(counts=((1, 1, 1, 1),), frozen="base"),
    ],
    ids=["bf16 in an unchanged loop", "tied and recomputed", "adapters"],
)
def test_what_fsdp2_offers(ranks: Pools, case: Case) -> None:
    ranks(4).run(equal, 2, case, Settings(reproducible=True, timeout_s=60.0), False)


def resume(rank: int, world: int, folder: str) -> None:
    """Two steps, a checkpoint of model and optimizer, a third step: as it goes on in new objects, and under FSDP2."""
    mesh, flat, third = nodes(2, 2), init_device_mesh("cpu", (world,)), Case(counts=((1, 0, 2, 1),), idiom="minibatch")
    found: list[dict[str, torch.Tensor]] = []
    for step in range(2):
        model = build(fully_shard, third, mesh, optimizer_sharding="world")
        optimizer = adamw(model)
        if step:
            _load(model, optimizer, folder)
        else:
            for number in range(2):
                train_step(model, optimizer, third, number, rank, world, Run(), False)
            weights, states = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
        train_step(model, optimizer, third, 2, rank, world, Run(), False)
        found.append(own_parameters(model))
    theirs = build(torch_fully_shard, third, flat)
    optimizer = adamw(theirs)
    _load(theirs, optimizer, folder)
    train_step(theirs, optimizer, third, 2, rank, world, Run(), True)
    found.append(own_parameters(theirs))
    for name, values in found[0].items():
        for other in found[1:]:
            torch.testing.assert_close(values, other[name], rtol=2e-5, atol=2e-6)


def _load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)


@pytest.mark.thorough
def test_a_checkpoint_is_that_of_a_1d_mesh(ranks: Pools, tmp_path: Path) -> None:
    ranks(4).run(resume, str(tmp_path))


def held(rank: int, world: int) -> tuple[dict[str, int], dict[str, int], int, int]:
    """Ledgers under "world" and "mesh"; bytes of one of AdamW's moments under "world", and of the model."""
    ledgers, moments = [], []
    for sharding in ("world", "mesh"):
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        for layer in model:
            fully_shard(layer, mesh=nodes(2, 2), optimizer_sharding=sharding)  # type: ignore[arg-type]
        fully_shard(model, mesh=nodes(2, 2), optimizer_sharding=sharding)  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        ledgers.append(root_of(cast(Any, model)).layout.ledger())
        states = [cast(DTensor, state["exp_avg"]) for state in optimizer.state.values()]
        moments.append(sum(state.to_local().nbytes for state in states))
    assert moments[1] == 2 * moments[0]
    return ledgers[0], ledgers[1], moments[0], sum(p.numel() * 4 for p in model.parameters())


def test_optimizer_states_are_of_one_part_of_all_ranks(ranks: Pools) -> None:
    for world, mesh, moment, model in ranks(4).run(held):
        assert moment == model // 4
        assert (world["published"], world["cache"]) == (model // 4, model // 4), "together a node's shard"
        assert (world["accumulator"], world["sums"]) == (model // 4, model // 4)
        assert (mesh["published"], mesh["accumulator"]) == (model // 2, model // 2)


def refused(rank: int, world: int) -> list[str]:
    layer, told = nn.Linear(4, 4), []
    falling = DeviceMesh("cpu", [[1, 0]], mesh_dim_names=("replicate", "shard"))
    for mesh, options in (
        (nodes(1, 2), {"optimizer_sharding": "mash"}),
        (nodes(1, 2), {"optimizer_sharding": "world", "settings": Settings(kernels="triton")}),
        (falling, {"optimizer_sharding": "world"}),
    ):
        with pytest.raises((ValueError, UnsupportedError)) as caught:
            fully_shard(layer, mesh=mesh, **options)  # type: ignore[arg-type]
        told.append(str(caught.value))
    assert type(layer) is nn.Linear and not isinstance(layer.weight, DTensor), "what is refused stays as it was"
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], mesh=init_device_mesh("cpu", (world,)))
    fully_shard(model, mesh=nodes(2, 1), optimizer_sharding="world")
    with pytest.raises(UnsupportedError) as caught:
        model(torch.ones(1, 4))
    return [*told, str(caught.value)]


def test_what_does_not_go_together_is_refused(ranks: Pools) -> None:
    word, kernels, falling, mixed = ranks(2).run(refused)[0]
    assert "must be 'mesh' or 'world', not 'mash'" in word
    assert kernels == "optimizer_sharding='world' does not go with Settings(kernels='triton') on the CPU"
    assert falling == "optimizer_sharding='world' does not go with a mesh whose ranks do not rise: [1, 0]"
    assert "units of one root must share both" in mixed or "units of one root must share a mesh" in mixed
