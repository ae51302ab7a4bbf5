"""LB-Mini: against LB-Micro, its microbatches against HiGHS, and with unequal or no work on a rank."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from support.highs import fewest_bins

from odc.balance import lb_micro, lb_mini, linear_cost, quadratic

CAP = 100
LENGTHS = st.lists(st.integers(1, CAP), min_size=1, max_size=48)
COSTS = st.sampled_from([linear_cost, quadratic(0.268, 4.05e-3)])


@given(LENGTHS, st.integers(1, 9), COSTS)
@settings(deadline=None)
def test_never_behind_lb_micro_and_no_empty_microbatch(lengths, ranks, cost):
    plan = lb_mini(lengths, ranks, CAP, cost)
    for options in ({}, {"equal_samples": True}):
        other = lb_micro(lengths, ranks, CAP, cost, **options)
        assert plan.longest <= other.longest * 1.001
    assert all(mb for microbatches in plan.ranks for mb in microbatches)


def test_equal_samples_may_have_the_shorter_longest_rank():
    """Found by the property above: equal sample counts, which LB-Micro drops for a longer step, end sooner."""
    lengths = [1, 1, 1, 17, 20, 21, 20, 23, 17, 1, 40, 44, 44, 48, 45, 50, 1, 66, 70, 70, 12, 41, 89, 22, 86]
    equal = lb_micro(lengths, 9, CAP, equal_samples=True).longest
    assert lb_mini(lengths, 9, CAP).longest <= equal < lb_micro(lengths, 9, CAP).longest


def test_microbatches_of_a_rank_are_few_and_even_in_tokens():
    plan = lb_mini([60, 30, 30, 20, 20], 1, CAP)
    tokens = [sum([60, 30, 30, 20, 20][i] for i in mb) for mb in plan.ranks[0]]
    assert tokens == [80, 80], "best-fit decreasing alone packs 90 and 70"


def test_microbatches_are_as_few_as_each_ranks_samples_allow():
    draw = random.Random(11)
    above = []
    for _ in range(30):
        ranks = draw.randint(1, 4)
        lengths = [draw.randint(10, CAP) for _ in range(draw.randint(ranks, 8 * ranks))]
        for microbatches in lb_mini(lengths, ranks, CAP).ranks:
            sizes = [lengths[i] for mb in microbatches for i in mb]
            if sizes:
                above.append(len(microbatches) - fewest_bins(sizes, CAP, len(microbatches)))
    assert len(above) >= 60
    assert set(above) <= {0, 1} and sum(above) <= len(above) // 20


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


def test_seed_only_chooses_among_equals():
    lengths = [5, 5, 5, 5, 9, 9]
    plans = [lb_mini(lengths, 3, 20, seed=seed) for seed in range(6)]
    assert len({plan.to_json() for plan in plans}) > 1
    assert len({tuple(sorted(plan.rank_costs)) for plan in plans}) == 1


def test_slow_ranks_get_less():
    lengths = [10] * 60
    plan = lb_mini(lengths, 3, CAP, speeds=[1.0, 1.0, 0.5])
    assert [sum(len(mb) for mb in microbatches) for microbatches in plan.ranks] == [24, 24, 12]
    assert plan.rank_costs == [240.0, 240.0, 240.0] and plan.gap == 0.0
