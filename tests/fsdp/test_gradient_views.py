"""`Settings(gradient_views=True)`: `.grad` lies in the accumulator until the next epoch begins, and not afterwards.

That training is FSDP2's is for tests/parity.
"""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from support.on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from odc import AbandonedMinibatchError, Settings, fully_shard
from odc.errors import UnsupportedError
from odc.fsdp import root_of

VIEWS = Settings(gradient_views=True, timeout_s=60.0)


def sharded(settings: Settings = VIEWS, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 5))
    for module in (*model, model):
        fully_shard(module, settings=settings, **options)
    return model


def backward(model: Any, value: float = 1.0, abandon: str = "") -> None:
    with model.minibatch():
        model(torch.full((2, 8), value)).square().sum().backward()
        if abandon:
            model.abandon_minibatch(abandon)


def local(model: nn.Module) -> list[torch.Tensor]:
    return [cast(Any, parameter.grad).to_local() for parameter in model.parameters()]


@on_ranks(2)
def test_a_gradient_takes_no_memory_of_its_own(rank: int, world: int) -> None:
    model, plain = sharded(), sharded(Settings(timeout_s=60.0))
    for step in range(3):
        backward(model, 1.0 + step)
        backward(plain, 1.0 + step)
        layout = root_of(model).layout
        for mine, theirs in zip(local(model), local(plain), strict=True):
            assert torch.equal(mine, theirs) and mine.abs().sum() > 0
            assert layout.is_mine(mine) and not layout.is_mine(theirs)
        for one in (model, plain):
            nn.utils.clip_grad_norm_(one.parameters(), 0.1)
            torch.optim.SGD(one.parameters(), lr=0.1).step()
            one.zero_grad()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.to_local(), theirs.to_local())


@on_ranks(2)
def test_a_gradient_lies_where_it_was_given_wherever_that_is_in_its_storage(rank: int, world: int) -> None:
    model = sharded()
    backward(model)
    model.zero_grad()
    (group, *_), flat = root_of(model).groups, torch.arange(1000.0)[100:]
    for param in group.odc_params:
        param.add_gradient(flat, 7)
        given = cast(Any, param.parameter.grad).to_local()
        assert given.flatten().tolist() == flat[7 : 7 + given.numel()].tolist() and given.numel()


@on_ranks(2)
def test_what_is_still_a_gradient_outlives_the_next_epoch(rank: int, world: int) -> None:
    """An evaluation between the backward and the step, an abandoned minibatch, and a loop that does not zero."""
    model = sharded()
    backward(model)
    kept, before = [parameter.grad for parameter in model.parameters()], [one.clone() for one in local(model)]
    with torch.no_grad():
        model(torch.ones(2, 8))
    layout = root_of(model).layout
    assert not any(layout.is_mine(one) for one in local(model)), "the epoch's sums begin at zero"
    assert all(map(torch.equal, local(model), before))
    assert all(parameter.grad is one for parameter, one in zip(model.parameters(), kept, strict=True))
    with pytest.raises(AbandonedMinibatchError):
        backward(model, 3.0, "a test")
    assert all(map(torch.equal, local(model), before)), "no rank got a gradient"
    backward(model)
    for one, first in zip(local(model), before, strict=True):
        assert torch.equal(one, 2 * first) and not layout.is_mine(one)
    model.zero_grad(set_to_none=False)
    backward(model)
    assert all(map(torch.equal, local(model), before))
    model.zero_grad()
    backward(model)
    assert all(map(torch.equal, local(model), before)) and all(layout.is_mine(one) for one in local(model))


@on_ranks(2)
def test_an_evaluation_in_inference_mode_leaves_gradients_that_can_be_changed(rank: int, world: int) -> None:
    model = sharded()
    backward(model)
    before = [one.clone() for one in local(model)]
    with torch.inference_mode():
        model(torch.ones(2, 8))
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    backward(model)
    assert all(torch.equal(one, 2 * first) for one, first in zip(local(model), before, strict=True))


@on_ranks(2)
def test_a_gradient_stays_when_the_root_is_gone(rank: int, world: int) -> None:
    model = sharded()
    backward(model)
    before = [one.clone() for one in local(model)]
    root_of(model).shut_down()()
    assert all(map(torch.equal, local(model), before))


@on_ranks(2)
def test_what_the_accumulator_cannot_hold_is_refused_by_name(rank: int, world: int) -> None:
    views = Settings(gradient_views=True, reproducible=True)
    with pytest.raises(UnsupportedError, match=r"that of '0.weight' is torch.float32, unit '0' sums in torch.float64$"):
        backward(sharded(views))
    low = nn.Linear(4, 4).to(torch.bfloat16)
    fully_shard(low, settings=VIEWS, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    with pytest.raises(UnsupportedError, match="'weight' is torch.bfloat16, unit '.root.' sums in torch.float32$"):
        low(torch.ones(1, 4, dtype=torch.bfloat16))
    hybrid = sharded(mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    with pytest.raises(
        UnsupportedError, match=f"^rank {rank}: .* does not go with 2 replicas, which read each other's"
    ):
        hybrid(torch.ones(1, 8))


@on_ranks(4)
def test_sums_of_nodes_are_brought_into_the_accumulator(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    made = [sharded(settings, mesh=mesh, optimizer_sharding="world") for settings in (VIEWS, Settings(timeout_s=60.0))]
    for step in range(2):
        for model in made:
            backward(model, 1.0 + step)
        views, plain = map(local, made)
        layout = root_of(made[0]).layout
        assert all(layout.is_mine(one) for one in views if one.numel())
        for mine, theirs in zip(views, plain, strict=True):
            torch.testing.assert_close(mine, theirs)
        for model in made:
            model.zero_grad()
