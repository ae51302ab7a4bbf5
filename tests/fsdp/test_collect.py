from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.members import BF16, F32, F64, HeapGroup, Layout
from support.ranks import RankPool
from torch import nn

from odc.fsdp.collect import push_counts, reduced, write_gradients
from odc.settings import Settings

LAYOUT: Layout = [[("w", 4, F32), ("b", 2, F32)], [("v", 3, F32)]]


class Param:
    """Stands in for a sharded parameter: notes what gradient it was given."""

    def __init__(self, dtype: torch.dtype = F32, *, requires_grad: bool = True) -> None:
        self.own_dtype = self.gradient_dtype = dtype
        self.parameter = nn.Parameter(torch.zeros(1), requires_grad=requires_grad)
        self.given: list[tuple[torch.Tensor, int]] = []

    def add_gradient(self, flat: torch.Tensor, first: int) -> None:
        self.given.append((flat, first))


def fill(group: HeapGroup, member: int, values: list[float]) -> None:
    unit = group.units[0]
    group.layouts[member].peer(member).accumulator(unit).copy_(torch.tensor(values))


# counts --------------------------------------------------------------------------------------------------------------


def test_counts_are_summed_over_all_members_by_parameter() -> None:
    with HeapGroup(LAYOUT, 2, replicas=2) as group:
        layout = group.layouts[1]
        assert push_counts(layout).tolist() == [0, 0, 0]
        for source, counts in enumerate([[1, 0, 2], [0, 0, 5], [3, 0, 0], [0, 0, 1]]):
            group.layouts[source].peer(1).pushes(source).copy_(torch.tensor(counts))
        assert push_counts(layout).tolist() == [4, 0, 8]
        assert push_counts(group.layouts[0]).tolist() == [0, 0, 0], "each member reads its own heap"


def test_counts_are_a_copy() -> None:
    with HeapGroup(LAYOUT, 1) as group:
        before = push_counts(group.layouts[0])
        group.layouts[0].peer(0).pushes(0).fill_(9)
        assert before.tolist() == [0, 0, 0]


# sums ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reproducible", [False, True])
def test_a_sum_is_divided_once_in_the_accumulators_dtype(reproducible: bool) -> None:
    with HeapGroup(LAYOUT, 2, settings=Settings(reproducible=reproducible)) as group:
        values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
        fill(group, 1, values)
        found = reduced(group.members[1].reduction, group.units[0], 3.0)
        dtype = F64 if reproducible else F32
        assert torch.equal(found, torch.tensor(values, dtype=dtype) / 3.0)
        assert group.layouts[1].peer(1).accumulator(group.units[0]).tolist() == values, "the accumulator itself stays"


def test_replicas_read_each_other_in_rank_order_and_get_the_same_bits() -> None:
    with HeapGroup(LAYOUT, 2, replicas=3) as group:
        column = (1, 3, 5)
        group.publish_all()
        for member, value in zip(column, [1e8, -1e8, 1.0], strict=True):
            fill(group, member, [value] * 6)
        fill(group, 0, [77.0] * 6)  # of the other shard
        members, used = [group.members[member] for member in column], [True, False]
        with ThreadPoolExecutor(len(column)) as threads:  # each waits for the others to add their parts up
            list(threads.map(lambda one: one.reduction.gather(used), members))
        for member in column:
            assert reduced(group.members[member].reduction, group.units[0], 2.0).tolist() == [0.5] * 6


# writing -------------------------------------------------------------------------------------------------------------


def write(group: HeapGroup, params: list[Param], used: list[bool], divide: float = 1.0) -> None:
    write_gradients(group.members[0].reduction, group.units[0], params, used, divide)  # type: ignore[arg-type]


def test_every_used_parameter_gets_its_part() -> None:
    with HeapGroup(LAYOUT, 1) as group:
        fill(group, 0, [2.0, 4.0, 6.0, 8.0, 10.0, 12.0])
        params = [Param(), Param()]
        write(group, params, [True, True], 2.0)
        ((flat, first),) = params[0].given
        assert (flat.tolist(), first) == ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 0)
        assert params[1].given[0][1] == 4
        assert params[1].given[0][0] is flat, "one buffer for the unit"


def test_a_parameter_that_nobody_used_or_that_is_frozen_gets_none() -> None:
    with HeapGroup(LAYOUT, 1) as group:
        fill(group, 0, [1.0] * 6)
        for params, used in (
            ([Param(), Param()], [False, True]),
            ([Param(requires_grad=False), Param()], [True, True]),
        ):
            write(group, params, used)
            assert params[0].given == [] and len(params[1].given) == 1


def test_a_unit_that_nobody_used_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("odc.fsdp.collect.reduced", lambda *args: pytest.fail("was summed"))
    with HeapGroup(LAYOUT, 1) as group:
        write(group, [Param(), Param()], [False, False])
        write(group, [Param(requires_grad=False), Param()], [True, False])


def test_gradients_are_rounded_to_the_parameters_dtype_after_the_division() -> None:
    with HeapGroup([[("w", 2, BF16), ("b", 1, F32)]], 1) as group:
        fill(group, 0, [1.0, 257.0, 1 / 3])
        params = [Param(BF16), Param(F32)]
        write(group, params, [True, True], 4.0)
        assert torch.equal(params[0].given[0][0], (torch.tensor([1.0, 257.0, 1 / 3]) / 4.0).to(BF16))
        assert torch.equal(params[1].given[0][0], torch.tensor([1.0, 257.0, 1 / 3]) / 4.0)


# on ranks ------------------------------------------------------------------------------------------------------------


def sharded(world: int) -> Any:
    import odc

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    odc.fully_shard(model, settings=odc.Settings(reproducible=True))
    return model


def accumulate_twice(rank: int, world: int) -> list[bool]:
    """A second minibatch without zero_grad adds to `.grad`, and hooks run once a minibatch."""
    model, calls = sharded(world), list[str]()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
    x, same = torch.full((2, 3), rank + 1.0), []

    def minibatch() -> None:
        with model.minibatch():
            for _ in range(2):
                model(x).sum().backward()

    minibatch()
    once = {name: parameter.grad.full_tensor().clone() for name, parameter in model.named_parameters()}
    minibatch()
    for name, parameter in model.named_parameters():
        same.append(torch.equal(parameter.grad.full_tensor(), 2 * once[name]))
        same.append(parameter.grad.placements == parameter.placements)
    assert sorted(calls) == sorted([*once] * 2), calls
    return same


def test_gradients_add_up_over_minibatches_and_hooks_run_once_each(ranks: Callable[[int], RankPool]) -> None:
    for same in ranks(2).run(accumulate_twice):
        assert same == [True] * 8


def one_element_chunks(rank: int, world: int) -> list[Any]:
    """The last bias has one element: rank 1's chunk is empty, and must get a `.grad` all the same."""
    model = sharded(world)
    if rank == 0:
        with model.minibatch():
            model(torch.ones(1, 3)).sum().backward()
    else:
        with model.minibatch():
            pass
    bias = dict(model.named_parameters())["1.bias"]
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    dist.barrier()
    return [bias.grad is not None, bias.grad.to_local().numel(), norm.full_tensor().item() > 0]


def test_a_rank_without_microbatches_has_every_gradient(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(one_element_chunks) == [[True, 1, True], [True, 0, True]]
