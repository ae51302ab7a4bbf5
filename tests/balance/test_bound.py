"""The lower bound against exhaustive search."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import up_to

from odc.balance import lower_bound

COSTS = st.lists(st.integers(0, 30).map(float), min_size=1, max_size=7)


def optimum(costs: list[float], ranks: int) -> float:
    """The best longest rank by trying every assignment (up to renaming the ranks)."""

    def place(i: int, loads: tuple[float, ...]) -> float:
        if i == len(costs):
            return max(loads)
        return min(
            place(i + 1, tuple(sorted(load + costs[i] if r == chosen else load for r, load in enumerate(loads))))
            for chosen in range(ranks)
            if chosen == 0 or loads[chosen] != loads[chosen - 1]
        )

    return place(0, (0.0,) * ranks)


@given(COSTS, st.integers(1, 4))
@settings(max_examples=up_to(150), deadline=None)
def test_never_above_the_optimum(costs: list[float], ranks: int):
    assert lower_bound(costs, ranks) <= optimum(costs, ranks) + 1e-9


@given(COSTS, st.integers(1, 6))
def test_adding_a_rank_never_raises_it(costs: list[float], ranks: int):
    assert lower_bound(costs, ranks + 1) <= lower_bound(costs, ranks) + 1e-9


def test_meets_the_optimum_where_it_is_known():
    assert lower_bound([5.0, 5.0, 5.0], 2) == 10.0
    assert lower_bound([9.0, 1.0, 1.0], 3) == 9.0
    assert lower_bound([1.0] * 8, 4) == 2.0
    assert lower_bound([4.0] * 5, 2) == 12.0
    assert lower_bound([], 3) == 0.0


def test_unequal_speeds():
    assert lower_bound([6.0, 6.0], 2, speeds=[1.0, 0.5]) == 8.0
    assert lower_bound([9.0, 1.0], 2, speeds=[1.0, 0.1]) == pytest.approx(10 / 1.1)
    assert lower_bound([9.0], 2, speeds=[3.0, 100.0]) == 0.09
    assert lower_bound([5.0, 5.0, 5.0], 2, speeds=[0.5, 0.5]) == 20.0


def test_limits():
    assert lower_bound([4.0, 4.0, 1.0], 2, needs=[9, 9, 1], limits=[9, 5]) == 8.0
    assert lower_bound([4.0, 4.0, 1.0], 2, needs=[9, 9, 1], limits=[9, 9]) == 5.0


@given(COSTS, st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0]), min_size=2, max_size=6))
def test_adding_a_rank_of_any_speed_never_raises_it(costs: list[float], speeds: list[float]):
    fewer = lower_bound(costs, len(speeds) - 1, speeds=speeds[:-1])
    assert lower_bound(costs, len(speeds), speeds=speeds) <= fewer * (1 + 1e-12)
