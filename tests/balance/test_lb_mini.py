"""LB-Mini: against exhaustive search, against LB-Micro, and with unequal or no work on a rank."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odc.balance import lb_micro, lb_mini, linear_cost, quadratic

CAP = 100
LENGTHS = st.lists(st.integers(1, CAP), min_size=1, max_size=48)
COSTS = st.sampled_from([linear_cost, quadratic(0.268, 4.05e-3)])


def optimum(costs: list[float], ranks: int) -> float:
    """The best longest rank by branch and bound over all assignments."""
    costs = sorted(costs, reverse=True)
    best = sum(costs)

    def place(i: int, loads: list[float]) -> None:
        nonlocal best
        if max(loads) >= best - 1e-9:
            return
        if i == len(costs):
            best = max(loads)
            return
        for chosen in {load: r for r, load in enumerate(loads)}.values():
            loads[chosen] += costs[i]
            place(i + 1, loads)
            loads[chosen] -= costs[i]

    place(0, [0.0] * ranks)
    return best


@given(LENGTHS, st.integers(1, 9), COSTS)
@settings(deadline=None)
def test_never_behind_lb_micro_and_no_empty_microbatch(lengths, ranks, cost):
    plan = lb_mini(lengths, ranks, CAP, cost)
    for options in ({}, {"equal_samples": True}):
        other = lb_micro(lengths, ranks, CAP, cost, **options)
        assert plan.longest <= other.longest * (1 + 1e-9)
    assert all(mb for microbatches in plan.ranks for mb in microbatches)


def test_microbatches_of_a_rank_are_few_and_even_in_tokens():
    plan = lb_mini([60, 30, 30, 20, 20], 1, CAP)
    tokens = [sum([60, 30, 30, 20, 20][i] for i in mb) for mb in plan.ranks[0]]
    assert tokens == [80, 80], "best-fit decreasing alone packs 90 and 70"


@pytest.mark.parametrize("cost", [linear_cost, quadratic(0.268, 4.05e-3)], ids=["linear", "quadratic"])
def test_small_instances_against_the_optimum(cost):
    draw = random.Random(7)
    gaps = []
    for _ in range(60):
        ranks = draw.randint(2, 4)
        lengths = [min(CAP, int(draw.lognormvariate(3, 1)) + 1) for _ in range(draw.randint(ranks, 10))]
        best = optimum([cost(n) for n in lengths], ranks)
        gaps.append(lb_mini(lengths, ranks, CAP, cost).longest / best - 1)
    assert min(gaps) > -1e-9
    assert max(gaps) <= 0.05
    assert sum(gap < 1e-9 for gap in gaps) >= 54


def test_a_giant_gets_a_rank_of_its_own():
    plan = lb_mini([100, 10, 10, 10, 10], 2, 100, quadratic(0, 1))
    assert sorted([sorted(mb) for mb in microbatches] for microbatches in plan.ranks) == [[[0]], [[1, 2, 3, 4]]]
    assert plan.gap == 0.0


def test_fewer_samples_than_ranks_leaves_ranks_without_work():
    plan = lb_mini([7, 5], 4, 10)
    assert sorted(plan.ranks) == [[], [], [[0]], [[1]]]


def test_unequal_counts_where_the_cap_asks_for_them():
    plan = lb_mini([60, 60, 60, 60, 100, 100, 40], 2, 100)
    assert plan.longest == plan.bound == 240.0
    assert sorted(len(microbatches) for microbatches in plan.ranks) == [3, 4]


def test_permutation_changes_only_names():
    draw = random.Random(2)
    lengths = [draw.randint(1, CAP) for _ in range(40)]
    shuffled = lengths[:]
    draw.shuffle(shuffled)
    one, other = (lb_mini(values, 4, CAP, quadratic(1, 0.01)) for values in (lengths, shuffled))
    assert [[[lengths[i] for i in mb] for mb in rank] for rank in one.ranks] == [
        [[shuffled[i] for i in mb] for mb in rank] for rank in other.ranks
    ]


def test_seed_only_chooses_among_equals():
    lengths = [5, 5, 5, 5, 9, 9]
    plans = [lb_mini(lengths, 3, 20, seed=seed) for seed in range(6)]
    assert len({plan.to_json() for plan in plans}) > 1
    assert len({tuple(sorted(plan.rank_costs)) for plan in plans}) == 1
