from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.together import run_together

from odc.errors import PlanError
from odc.eval import RequestPlan, plan_requests

COUNTS = st.integers(1, 6).flatmap(
    lambda world: st.dictionaries(
        st.sampled_from("abc"), st.lists(st.integers(0, 9), min_size=world, max_size=world).map(tuple), min_size=1
    )
)


@given(COUNTS)
def test_padding_evens_the_counts_and_the_waste_is_what_was_added(counts):
    world = len(next(iter(counts.values())))
    plans = [RequestPlan(counts, member) for member in range(world)]
    for kind, by_member in counts.items():
        assert {plan.own(kind) + plan.pads(kind) for plan in plans} == {max(by_member)}
        assert plans[0].waste(kind) == sum(plan.pads(kind) for plan in plans)
        assert plans[0].waste(kind) == world * max(by_member) - sum(by_member)
    assert plans[-1].waste() == sum(plans[0].waste(kind) for kind in counts)


@given(st.integers(0, 40), st.integers(1, 8))
def test_dealing_in_turn_wastes_less_than_one_a_rank(requests, world):
    dealt = tuple(len(range(member, requests, world)) for member in range(world))
    assert RequestPlan({"x": dealt}, 0).waste() <= world - 1


@pytest.mark.parametrize("counts", [(), (1, -1), (3,)])
def test_counts_that_cannot_be(counts: tuple[int, ...]):
    with pytest.raises(PlanError, match="do not fit member 1"):
        RequestPlan({"x": counts}, 1)


def test_every_rank_learns_all_kinds_also_those_it_lacks():
    mine = [{"generate": 3}, {"score": 2, "generate": 1}, {}]
    plans = run_together(3, lambda peers: plan_requests(mine[peers.me], peers))
    assert [dict(plan.counts) for plan in plans] == [{"generate": (3, 1, 0), "score": (0, 2, 0)}] * 3
    assert list(plans[2].counts) == ["generate", "score"]
    assert [plan.me for plan in plans] == [0, 1, 2]
    assert plans[0].waste() == 9 - 4 + 6 - 2
