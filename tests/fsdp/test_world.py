"""`optimizer_sharding="world"`: a 2-D mesh whose optimizer is sharded over all ranks trains as FSDP2 over all ranks."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.compare import assert_same, assert_trained_alike
from support.models import Case, Run, adamw, build, own_parameters, reduced_exactly, train, train_step
from support.on_ranks import on_ranks
from support.ranks import Pools
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from odc import Settings, fully_shard
from odc.errors import UnsupportedError
from odc.fsdp import root_of

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
    ranks(2).run(equal, 2, case, Settings(reproducible=True, second_buffer=True, timeout_s=60.0), True)


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


@pytest.mark.thorough
@on_ranks(4)
def test_a_checkpoint_is_that_of_a_1d_mesh(rank: int, world: int, tmp_path: Path) -> None:
    """Two steps, a checkpoint of model and optimizer, a third step: as it goes on in new objects, and under FSDP2."""
    mesh, flat, third = nodes(2, 2), init_device_mesh("cpu", (world,)), Case(counts=((1, 0, 2, 1),), idiom="minibatch")
    found: list[dict[str, torch.Tensor]] = []
    for step in range(2):
        model = build(fully_shard, third, mesh, optimizer_sharding="world")
        optimizer = adamw(model)
        if step:
            _load(model, optimizer, tmp_path)
        else:
            for number in range(2):
                train_step(model, optimizer, third, number, rank, world, Run(), False)
            weights, states = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": states}, checkpoint_id=tmp_path)
        train_step(model, optimizer, third, 2, rank, world, Run(), False)
        found.append(own_parameters(model))
    theirs = build(torch_fully_shard, third, flat)
    optimizer = adamw(theirs)
    _load(theirs, optimizer, tmp_path)
    train_step(theirs, optimizer, third, 2, rank, world, Run(), True)
    found.append(own_parameters(theirs))
    for name, values in found[0].items():
        for other in found[1:]:
            torch.testing.assert_close(values, other[name], rtol=2e-5, atol=2e-6)


def _load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)


@on_ranks(4)
def test_optimizer_states_are_of_one_part_of_all_ranks(rank: int, world: int) -> None:
    ledgers, moments = {}, {}
    for sharding in ("world", "mesh"):
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        for module in (*model, model):
            fully_shard(module, mesh=nodes(2, 2), optimizer_sharding=sharding)  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        ledgers[sharding] = root_of(cast(Any, model)).layout.ledger()
        states = [cast(DTensor, state["exp_avg"]) for state in optimizer.state.values()]
        moments[sharding] = sum(state.to_local().nbytes for state in states)
    whole = sum(p.numel() * 4 for p in model.parameters())
    assert moments == {"world": whole // 4, "mesh": whole // 2}
    # Together a node's shard: what is published and cached, accumulated and summed for other nodes.
    assert {ledgers["world"][region] for region in ("published", "cache", "accumulator", "sums")} == {whole // 4}
    assert {ledgers["mesh"][region] for region in ("published", "accumulator")} == {whole // 2}


@on_ranks(2)
def test_what_does_not_go_together_is_refused(rank: int, world: int) -> None:
    layer = nn.Linear(4, 4)
    falling = DeviceMesh("cpu", [[1, 0]], mesh_dim_names=("replicate", "shard"))
    combined = "^optimizer_sharding='world' does not go with "
    for mesh, options, message in (
        (nodes(1, 2), {"optimizer_sharding": "mash"}, "must be 'mesh' or 'world', not 'mash'"),
        (
            nodes(1, 2),
            {"optimizer_sharding": "world", "settings": Settings(kernels="triton")},
            rf"{combined}Settings\(kernels='triton'\) on the CPU$",
        ),
        (falling, {"optimizer_sharding": "world"}, rf"{combined}a mesh whose ranks do not rise: \[1, 0\]$"),
    ):
        with pytest.raises((ValueError, UnsupportedError), match=message):
            fully_shard(layer, mesh=mesh, **options)  # type: ignore[arg-type]
    assert type(layer) is nn.Linear and not isinstance(layer.weight, DTensor), "what is refused stays as it was"
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], mesh=init_device_mesh("cpu", (world,)))
    fully_shard(model, mesh=nodes(2, 1), optimizer_sharding="world")
    with pytest.raises(UnsupportedError, match="units of one root must share"):
        model(torch.ones(1, 4))
