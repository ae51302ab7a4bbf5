"""Parts of a state that another number of ranks has kept, and modules that are divided anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from odc import fully_shard
from odc.errors import ConfigError, UnsupportedError
from odc.fsdp._torch_reshard import is_sharded_over, shard_anew
from odc.fsdp.rejoin import sharded_groups
from odc.fsdp.root_layout import forget_calls
from odc.recovery.members import Share, needed_ranks, on_whole_hosts
from odc.recovery.reshard import FormerLayout
from odc.recovery.slots import Slots
from odc.recovery.state import Division, TrainingState

RANKS = st.integers(1, 7)


def dealt(tensor: torch.Tensor, world: int, dim: int) -> list[torch.Tensor]:
    """As torch shards a tensor."""
    chunks = list(tensor.chunk(world, dim))
    return chunks + [tensor.narrow(dim, 0, 0)] * (world - len(chunks))


def former_of(slots: list[Slots], rank: int, world: int) -> tuple[FormerLayout, list[int]]:
    """And the ranks whose slots it has asked for."""
    asked: list[int] = []

    def find(one: int) -> Slots:
        asked.append(one)
        return slots[one]

    return FormerLayout(find, 5, len(slots), rank, world), asked


@given(st.integers(1, 40), RANKS, RANKS, st.integers(0, 1))
def test_each_rank_gets_the_rows_that_torch_deals_it(rows: int, before: int, world: int, dim: int) -> None:
    shape = (rows, 3) if dim == 0 else (3, rows)
    whole = torch.arange(3.0 * rows).view(shape)
    slots = [Slots.create(Share(0, rank)) for rank in range(before)]
    for mine, part in zip(slots, dealt(whole, before, dim), strict=True):
        mine.write(5, [torch.zeros(2), part], b"")
    for rank, expected in enumerate(dealt(whole, world, dim)):
        former, asked = former_of(slots, rank, world)
        assert torch.equal(former.part(1, Division(dim, rows)), expected)
        rows_there = [set(part.flatten().tolist()) for part in dealt(whole, before, dim)]
        needed = [one for one in range(before) if rows_there[one] & set(expected.flatten().tolist())]
        assert asked == (needed or [0]), "it reads what it needs, and that once"


def test_a_tensor_that_is_no_part_is_refused() -> None:
    slots = Slots.create(Share(0, 0))
    slots.write(1, [torch.zeros(4)], b"")
    with pytest.raises(ConfigError, match=r"tensor 0 of the kept state has shape \[4\] on rank 0 of 2, .* of 10 rows"):
        FormerLayout(lambda rank: slots, 1, 2, 0, 1).part(0, Division(0, 10))


@given(st.integers(0, 30), RANKS, RANKS)
def test_no_rank_needs_more_than_its_share_of_the_others(rows: int, world: int, before: int) -> None:
    needed = [needed_ranks(rows, world, rank, before) for rank in range(world)]
    with_rows = [one for one, part in enumerate(dealt(torch.zeros(rows), before, 0)) if len(part)]
    assert sorted({one for each in needed for one in each}) == with_rows


def test_hosts_of_equal_size_go_on() -> None:
    assert on_whole_hosts({0: "a", 1: "a", 3: "a"}) == (0, 1, 3)
    assert on_whole_hosts({0: "a", 2: "b", 3: "b", 4: "c", 5: "c"}) == (2, 3, 4, 5)
    assert on_whole_hosts({5: "b", 0: "a"}) == (0, 5)


@pytest.fixture
def group() -> Iterator[Any]:
    def make(rank: int, world: int) -> None:
        from torch.testing._internal.distributed import fake_pg  # noqa: F401  makes the backend known

        if dist.is_initialized():
            dist.destroy_process_group()
        stores: Any = dist
        dist.init_process_group("fake", store=stores.HashStore(), rank=rank, world_size=world)

    yield make
    dist.destroy_process_group()
    forget_calls()


def test_parameters_stay_the_same_objects(group: Any) -> None:
    group(1, 3)
    model: Any = nn.Sequential(nn.Linear(4, 10), nn.Linear(10, 4))
    model[1].weight.requires_grad_(False)
    fully_shard(model[0])
    fully_shard(model)
    parameters, groups = list(model.parameters()), sharded_groups(model)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    assert is_sharded_over(groups[0], 1, 3)
    group(0, 2)
    shard_anew(groups, 2)
    assert is_sharded_over(groups[0], 0, 2) and not is_sharded_over(groups[0], 1, 2)
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    whole = [parameter.shape for parameter in parameters]
    assert whole == [(10, 4), (10,), (4, 10), (4,)]
    assert [parameter.to_local().shape for parameter in parameters] == [(5, 4), (5,), (2, 10), (2,)]
    assert all(parameter.device_mesh.size() == 2 for parameter in parameters)
    assert [parameter.requires_grad for parameter in parameters] == [True, True, False, True]
    assert all(parameter.grad is None for parameter in parameters)
    # The state dict of torch's hooks is of the same memory.
    with torch.no_grad():
        parameters[0].fill_(3.0)
    assert model.state_dict()["0.weight"].to_local().unique().tolist() == [3.0]


class WithPlainState(torch.optim.SGD):
    """Keeps a plain tensor of the local part, as no optimizer of torch's does."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["seen"] = parameter.to_local().abs()


def test_an_optimizer_whose_state_has_no_layout_is_refused(group: Any) -> None:
    group(0, 2)
    model: Any = nn.Linear(4, 4)
    fully_shard(model)
    plain, usual = WithPlainState(model.parameters()), torch.optim.AdamW(model.parameters())
    TrainingState([model], [plain, usual], {}).refuse_undivided()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    usual.step()
    TrainingState([model], [usual], {}).refuse_undivided()
    plain.step()
    with pytest.raises(UnsupportedError, match="WithPlainState keeps 'seen', a plain tensor, for a sharded parameter"):
        TrainingState([model], [plain], {}).refuse_undivided()


def test_moments_go_back_though_each_unit_had_a_mesh_of_its_own(group: Any) -> None:
    group(0, 2)
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 8))
    for unit in (*model, model):
        fully_shard(unit)
    assert len({id(parameter.device_mesh) for parameter in model.parameters()}) > 1
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = TrainingState([model], [optimizer], {})
    tensors, text = state.take()
    kept = [tensor.clone() for tensor in tensors]
    group(0, 1)
    shard_anew(sharded_groups(model), 1)
    state.put(kept, text, lambda number, cut: torch.cat([kept[number]] * 2, cut.dim))
    for parameter in model.parameters():
        moment = optimizer.state[parameter]["exp_avg"]
        assert moment.device_mesh == parameter.device_mesh
        assert moment.to_local().shape == parameter.shape


def test_a_state_on_another_mesh_than_the_parameters_is_refused(group: Any) -> None:
    group(0, 2)
    model: Any = nn.Linear(4, 4)
    fully_shard(model)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicas", "shards"))
    own = nn.ParameterDict({"own": distribute_tensor(torch.zeros(4), mesh)})
    TrainingState([model], [], {}).take()
    with pytest.raises(UnsupportedError, match="recovery is for states on meshes of parameters"):
        TrainingState([model], [], {"own": own}).take()


def test_models_whose_meshes_have_other_names_keep_them(group: Any) -> None:
    group(0, 2)
    models: Any = [nn.Linear(4, 6), nn.Linear(6, 8)]
    fully_shard(models[0])
    fully_shard(models[1], mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("shards",)))
    parameters = [parameter for model in models for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = TrainingState(models, [optimizer], {})
    tensors, text = state.take()
    state.put([tensor.clone() for tensor in tensors], text)
    assert all(optimizer.state[one]["exp_avg"].device_mesh == one.device_mesh for one in parameters)
    with pytest.raises(UnsupportedError, match="where the number of ranks changes, all units need the same mesh"):
        state.refuse_undivided()
