"""LB-Micro: equal counts, samples equal on request, and microbatches of a step close to each other."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import up_to

from odc.balance import lb_micro, local_sort, quadratic
from odc.errors import PlanError

CAP = 100
LENGTHS = st.lists(st.integers(1, CAP), min_size=1, max_size=48)


@given(LENGTHS, st.integers(1, 9), st.booleans())
@settings(deadline=None)
def test_equal_counts_and_costliest_step_first(lengths, ranks, equal_samples):
    plan = lb_micro(lengths, ranks, CAP, quadratic(1, 0.1), equal_samples=equal_samples)
    assert len({len(microbatches) for microbatches in plan.ranks}) == 1
    for costs in plan.costs:
        assert costs == sorted(costs, reverse=True)
    if equal_samples:
        counts = [sum(len(mb) for mb in microbatches) for microbatches in plan.ranks]
        assert max(counts) - min(counts) <= 1


@given(LENGTHS, st.integers(1, 9))
@settings(max_examples=up_to(50), deadline=None)
def test_never_behind_equal_samples(lengths, ranks):
    cost = quadratic(1, 0.1)
    assert lb_micro(lengths, ranks, CAP, cost).stepped <= lb_micro(
        lengths, ranks, CAP, cost, equal_samples=True
    ).stepped * (1 + 1e-9)


def test_known_instance():
    plan = lb_micro([60, 60, 40, 40, 30, 30, 20, 20], 2, 100)
    assert plan.costs == [[100.0, 50.0], [100.0, 50.0]] or plan.stepped == 150.0


@pytest.mark.parametrize(
    ("lengths", "first", "second"),
    [([50, 40, 100, 10, 10], [100, 20], [50, 40]), ([100, 100, 90, 60, 60], [100, 60, 60], [100, 90, 0])],
)
def test_in_a_step_the_costliest_microbatch_goes_to_the_rank_with_the_least_so_far(lengths, first, second):
    plan = lb_micro(lengths, 2, 100)
    assert sorted(plan.costs, reverse=True) == sorted([first, second], reverse=True)
    assert plan.longest == max(sum(first), sum(second))


def test_fewer_samples_than_ranks_gives_place_holders():
    plan = lb_micro([7, 5], 4, 10)
    assert sorted(plan.ranks) == [[[]], [[]], [[0]], [[1]]]


@pytest.mark.parametrize("seed", range(5))
def test_far_ahead_of_local_sort_on_skewed_lengths(seed: int):
    draw = random.Random(seed)
    lengths = [min(65536, int(draw.lognormvariate(9.25, 1.05)) + 1) for _ in range(64)]
    cost = quadratic(8.768 / 32768, 4.348 / 32768**2)
    assert lb_micro(lengths, 8, 65536, cost).stepped < 0.9 * local_sort(lengths, 8, 65536, cost).stepped


def test_slow_ranks_get_cheaper_microbatches():
    plan = lb_micro([10] * 60, 3, 100, speeds=[1.0, 1.0, 0.5])
    assert len({len(microbatches) for microbatches in plan.ranks}) == 1
    assert plan.longest == 240.0 and plan.stepped <= 1.1 * plan.longest


def test_equal_samples_of_groups():
    lengths = [9, 1, 2, 8, 5, 5, 4, 6]
    plan = lb_micro(lengths, 2, 20, groups=[0, 0, 1, 1, 2, 2, 3, 3], equal_samples=True)
    for microbatches in plan.ranks:
        assert len({i // 2 for mb in microbatches for i in mb}) == 2
    with pytest.raises(PlanError, match="groups of unequal size"):
        lb_micro(lengths, 2, 20, groups=[0, 0, 0, 1, 2, 2, 3, 3], equal_samples=True)
