from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odc.balance import Cost, lb_dynamic, linear_cost, quadratic, queue_of
from odc.errors import PlanError

lengths_of = st.lists(st.integers(1, 1000), min_size=1, max_size=60)


@given(lengths_of, st.integers(1, 9), st.integers(1, 12), st.sampled_from([linear_cost, quadratic(1.0, 0.01)]))
def test_every_sample_once_under_the_cap_longest_first(
    lengths: list[int], ranks: int, per_rank: int, cost: Cost
) -> None:
    plan = lb_dynamic(lengths, ranks, 1000, cost=cost, per_rank=per_rank)
    plan.validate(len(lengths))
    listed = queue_of(plan)
    costs = [cost for _, cost in listed]
    assert costs == sorted(costs, reverse=True)
    share = sum(lengths) // (ranks * per_rank)
    for microbatch, _ in listed:
        tokens = sum(lengths[i] for i in microbatch)
        assert 0 < tokens <= 1000
        assert len(microbatch) == 1 or tokens <= share


@given(lengths_of, st.integers(1, 9))
def test_in_the_predicted_schedule_the_free_rank_takes_the_next(lengths: list[int], ranks: int) -> None:
    plan = lb_dynamic(lengths, ranks, 1000)
    costs = [cost for _, cost in queue_of(plan)]
    assert plan.longest <= sum(costs) / ranks + max(costs) * (1 - 1 / ranks) + 1e-6, "the bound of any list"
    ends = plan.rank_costs
    assert all(end - costs[-1] <= min(ends) for end, costs in zip(ends, plan.costs, strict=True) if costs)


def test_by_hand() -> None:
    plan = lb_dynamic([40, 8, 8, 8, 8, 8], 2, 100, per_rank=2)
    assert [cost for _, cost in queue_of(plan)] == [40, 16, 16, 8]
    assert plan.rank_costs == [40, 40]


def test_short_samples_stand_alone_where_there_are_few() -> None:
    assert [len(mb) for mb, _ in queue_of(lb_dynamic([5, 4, 3], 8, 100))] == [1, 1, 1]


def test_the_seed_decides_ties_only() -> None:
    lengths = [7, 7, 7, 9, 2]
    plans = [lb_dynamic(lengths, 2, 10, seed=seed) for seed in range(20)]
    assert len({str(plan.ranks) for plan in plans}) > 1
    assert len({tuple(cost for _, cost in queue_of(plan)) for plan in plans}) == 1


def test_a_sample_over_the_cap_is_named() -> None:
    with pytest.raises(PlanError, match="sample 1 has 11 tokens, more than the cap of 10"):
        lb_dynamic([3, 11], 2, 10)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint64])
def test_lengths_of_narrow_integers_do_not_wrap(dtype: type) -> None:
    lengths = [200 if dtype is np.uint8 else 30_000] * 3 + [100] * 61
    assert lb_dynamic(np.array(lengths, dtype), 8, 30_000) == lb_dynamic(lengths, 8, 30_000)


def test_one_cap_is_for_all_ranks() -> None:
    assert lb_dynamic([5, 7], 2, [9, 9]) == lb_dynamic([5, 7], 2, 9)
    with pytest.raises(PlanError, match="one max_tokens"):
        lb_dynamic([5, 7], 2, [9, 8])
