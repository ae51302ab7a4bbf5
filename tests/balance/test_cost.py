"""Simple cost models. FLOPs of a config: test_flops."""

from __future__ import annotations

import pytest

from odc.balance import WindowedCost, lb_mini, linear_cost, quadratic
from odc.errors import PlanError


def test_linear_and_quadratic():
    assert linear_cost(7) == 7.0
    assert quadratic(2, 3)(10) == 2 * 10 + 3 * 100


@pytest.mark.parametrize("coefficients", [(-1, 1), (1, -1), (0, 0), (float("nan"), 1)])
def test_quadratic_refuses(coefficients: tuple[float, float]):
    with pytest.raises(PlanError):
        quadratic(*coefficients)


def test_a_window_costs_the_same_up_to_it_and_grows_linearly_after_it():
    full, windowed = quadratic(2, 3), WindowedCost(2, 1, ((100, 2),))
    assert windowed(100) == full(100)
    assert windowed(99) == full(99)
    assert windowed(101) < full(101)
    growth = [windowed(length + 1) - windowed(length) - (2 + 1 * (2 * length + 1)) for length in (100, 500, 9000)]
    assert growth[1] == growth[2] == pytest.approx(2 * 2 * 100)


def test_policies_refuse_costs_that_are_not_numbers():
    with pytest.raises(PlanError, match=r"cost of sample 1 \(3 tokens\)"):
        lb_mini([2, 3], 1, 8, cost=lambda length: float("nan") if length == 3 else 1.0)
