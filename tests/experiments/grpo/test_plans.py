from __future__ import annotations

from importlib.util import find_spec

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odc.balance import linear_cost
from odc.balance.cost import VERL_WORKLOAD
from odc.errors import PlanError
from odc.experiments.grpo.objective import verl_plan

LENGTHS = st.lists(st.integers(1, 100), min_size=2, max_size=40).filter(lambda lengths: len(lengths) % 2 == 0)


@given(LENGTHS, st.integers(100, 400))
def test_equal_samples_and_equal_counts_under_the_cap(lengths: list[int], cap: int) -> None:
    plan = verl_plan(lengths, 2, cap, linear_cost)
    plan.validate(len(lengths))
    assert len({sum(len(some) for some in rank) for rank in plan.ranks}) == 1
    assert len({len(rank) for rank in plan.ranks}) == 1
    assert all(some and sum(lengths[i] for i in some) <= cap for rank in plan.ranks for some in rank)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([5, 5, 5], "3 samples do not divide by 2 ranks"),
        ([5, 101], "sample 1 has 101 tokens"),
    ],
)
def test_where_verl_raises(lengths: list[int], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        verl_plan(lengths, 2, 100, linear_cost)


@pytest.mark.skipif(find_spec("verl") is None, reason="needs verl: make test-integrations")
@pytest.mark.filterwarnings("ignore")
@given(LENGTHS)
def test_as_verl_partitions(lengths: list[int]) -> None:
    from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

    plan = verl_plan(lengths, 2, 150, linear_cost)

    def loads(parts: list[list[int]]) -> list[float]:
        return sorted(sum(VERL_WORKLOAD(lengths[i]) for i in part) for part in parts)

    work = [int(VERL_WORKLOAD(length)) for length in lengths]
    ours = [[i for some in rank for i in some] for rank in plan.ranks]
    theirs = get_seqlen_balanced_partitions(work, 2, equal_size=True)
    assert loads(ours) == pytest.approx(loads(theirs), rel=0.02)  # ties are merged in another order
    for part, rank in zip(ours, plan.ranks, strict=True):
        split = get_seqlen_balanced_partitions([work[i] for i in part], len(rank), equal_size=False)
        assert loads([[part[i] for i in some] for some in split]) == pytest.approx(loads(rank), rel=0.1)
