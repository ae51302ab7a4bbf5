"""From accumulators to `.grad`: which parameters get one, in which dtype, and what is added up in which order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.members import BF16, F32, F64, HeapGroup, Layout
from support.on_ranks import on_ranks
from torch import nn

import odc
from odc.fsdp.collect import push_counts, reduced, write_gradients
from odc.protocol import UnitSpec
from odc.settings import Settings

LAYOUT: Layout = [[("w", 4, F32), ("b", 2, F32)], [("v", 3, F32)]]
VALUES = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


class Param:
    """Stands in for a sharded parameter: notes what gradient it was given."""

    def __init__(self, dtype: torch.dtype = F32, *, requires_grad: bool = True) -> None:
        self.own_dtype = self.gradient_dtype = dtype
        self.parameter = nn.Parameter(torch.zeros(1), requires_grad=requires_grad)
        self.given: list[tuple[torch.Tensor, int]] = []

    def add_gradient(self, flat: torch.Tensor, first: int) -> None:
        self.given.append((flat, first))


def fill(group: HeapGroup, member: int, values: list[float]) -> None:
    group.layouts[member].peer(member).accumulator(group.units[0]).copy_(torch.tensor(values))


def write(group: HeapGroup, params: list[Param], used: list[bool], divide: float = 1.0) -> None:
    write_gradients(group.members[0].reduction, group.units[0], params, used, divide)  # type: ignore[arg-type]


def test_counts_are_summed_over_all_members_by_parameter() -> None:
    with HeapGroup(LAYOUT, 2, replicas=2) as group:
        layout = group.layouts[1]
        before = push_counts(layout)
        for source, counts in enumerate([[1, 0, 2], [0, 0, 5], [3, 0, 0], [0, 0, 1]]):
            group.layouts[source].peer(1).pushes(source).copy_(torch.tensor(counts))
        assert push_counts(layout).tolist() == [4, 0, 8]
        assert push_counts(group.layouts[0]).tolist() == [0, 0, 0], "each member reads its own heap"
        assert before.tolist() == [0, 0, 0], "they are a copy"


@pytest.mark.parametrize(("reproducible", "dtype"), [(False, F32), (True, F64)])
def test_a_sum_is_divided_once_in_the_accumulators_dtype(reproducible: bool, dtype: torch.dtype) -> None:
    with HeapGroup(LAYOUT, 2, settings=Settings(reproducible=reproducible)) as group:
        fill(group, 1, VALUES)
        assert torch.equal(
            reduced(group.members[1].reduction, group.units[0], 3.0), torch.tensor(VALUES, dtype=dtype) / 3.0
        )
        assert group.layouts[1].peer(1).accumulator(group.units[0]).tolist() == VALUES, "the accumulator itself stays"


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_sum_of_several_parts_may_go_into_one_of_them(place: int) -> None:
    """As over three nodes, of which each has its own accumulator at another place in the order."""
    unit = UnitSpec.build(0, "u", [("w", 3, F32)], F32)
    parts = [torch.tensor([1e8, 1.0, 0.1]), torch.tensor([3.0, 1e-8, 0.2]), torch.tensor([-1e8, 5.0, 0.3])]
    expected = (parts[0] + parts[1] + parts[2]) / 3.0
    others = [part.clone() for i, part in enumerate(parts) if i != place]

    class Parts:
        def parts(self, unit: UnitSpec) -> Iterator[torch.Tensor]:
            return iter(parts)

    found = reduced(Parts(), unit, 3.0, parts[place])  # type: ignore[arg-type]
    assert found is parts[place] and torch.equal(found, expected)
    assert all(map(torch.equal, others, [part for i, part in enumerate(parts) if i != place])), "others' parts stay"


def test_used_parameters_get_their_part(monkeypatch: pytest.MonkeyPatch) -> None:
    with HeapGroup(LAYOUT, 1) as group:
        fill(group, 0, VALUES)
        for params, used in (
            ([Param(), Param()], [True, True]),
            ([Param(), Param()], [False, True]),
            ([Param(requires_grad=False), Param()], [True, True]),  # frozen since
        ):
            write(group, params, used, 2.0)
            ((flat, first),) = params[1].given
            assert (flat.tolist(), first) == ([value / 2 for value in VALUES], 4)
            assert [one is flat for one, _ in params[0].given] == [True] * used[0], "one buffer for the unit"
        monkeypatch.setattr("odc.fsdp.collect.reduced", lambda *args: pytest.fail("was summed for no parameter"))
        write(group, [Param(), Param()], [False, False])


def test_gradients_are_rounded_to_the_parameters_dtype_after_the_division() -> None:
    with HeapGroup([[("w", 2, BF16), ("b", 1, F32)]], 1) as group:
        fill(group, 0, [1.0, 257.0, 1 / 3])
        params = [Param(BF16), Param(F32)]
        write(group, params, [True, True], 4.0)
        for param, dtype in zip(params, (BF16, F32), strict=True):
            assert torch.equal(param.given[0][0], (torch.tensor([1.0, 257.0, 1 / 3]) / 4.0).to(dtype))


@on_ranks(2)
def test_gradients_add_up_over_minibatches_and_hooks_run_once_each(rank: int, world: int) -> None:
    """The last bias has one element: rank 1's chunk is empty and has a `.grad` all the same, also without microbatches.

    A norm over DTensors would hang otherwise.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    odc.fully_shard(model, settings=odc.Settings(reproducible=True))
    calls = list[str]()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
    once: dict[str, torch.Tensor] = {}
    for number in (1, 2):  # without zero_grad in between
        with model.minibatch():
            for _ in range(2 if rank == 0 else 0):
                model(torch.full((2, 3), 1.5)).sum().backward()
        for name, parameter in model.named_parameters():
            whole = parameter.grad.full_tensor()
            assert torch.equal(whole, number * once.setdefault(name, whole.clone())), name
            assert parameter.grad.placements == parameter.placements
    assert sorted(calls) == sorted([*once] * 2), calls
    assert dict(model.named_parameters())["1.bias"].grad.to_local().numel() == 1 - rank
    assert torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor().item() > 0
