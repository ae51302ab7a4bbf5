"""Fits against data whose coefficients are known."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import up_to

from odc.balance import cost_from_config, fit, fit_scale, quadratic
from odc.errors import PlanError

MICROBATCHES = [[100], [1000, 50], [4000], [300, 300, 300], [8000, 20], [2500, 900], [16]]


@settings(max_examples=up_to(50), deadline=None)
@given(st.floats(1e-6, 1e-3), st.floats(1e-10, 1e-7), st.floats(0, 0.1))
def test_finds_the_coefficients_again(a: float, b: float, fixed: float) -> None:
    seconds = [fixed + a * sum(own) + b * sum(n * n for n in own) for own in MICROBATCHES]
    found = fit(MICROBATCHES, seconds)
    assert found.error < 1e-6
    assert found.predict([3000, 70]) == pytest.approx(fixed + a * 3070 + b * (3000**2 + 70**2), rel=1e-4)


def test_the_error_is_the_noise_and_no_coefficient_is_negative() -> None:
    rng = random.Random(0)
    microbatches = [[rng.randint(10, 10_000)] for _ in range(400)]
    true = quadratic(2e-5, 1e-9)
    seconds = [true(own[0]) * (1 + rng.gauss(0, 0.05)) for own in microbatches]
    found = fit(microbatches, seconds)
    assert 0.04 < found.error < 0.06
    assert found.worst < 0.25
    assert found.cost(8000) == pytest.approx(true(8000), rel=0.03)
    falling = [1.0 / n for n in (1, 2, 3)]
    with pytest.raises(PlanError, match="do not grow"):
        fit([[1], [2], [3]], falling)


def test_time_that_does_not_hang_on_squares_is_linear() -> None:
    found = fit(MICROBATCHES, [1e-4 * sum(own) for own in MICROBATCHES])
    assert found.cost(10) == pytest.approx(1e-3, rel=1e-6)
    assert found.cost(10_000) == pytest.approx(1.0, rel=1e-6)
    assert "0.0%" in str(found)


def test_scale_of_a_given_cost() -> None:
    flops = cost_from_config(
        {
            "hidden_size": 8,
            "num_hidden_layers": 2,
            "intermediate_size": 16,
            "vocab_size": 32,
            "num_attention_heads": 4,
        }
    )
    seconds = [0.01 + 3e-12 * sum(flops(n) for n in own) for own in MICROBATCHES]
    found = fit_scale(flops, MICROBATCHES, seconds)
    assert (found.scale, found.fixed) == (pytest.approx(3e-12), pytest.approx(0.01))


@pytest.mark.parametrize("seconds", [[1.0, 2.0], [1.0, 0.0, 2.0], [1.0, float("nan"), 2.0]])
def test_refuses_what_was_not_measured(seconds: list[float]) -> None:
    with pytest.raises(PlanError):
        fit([[1], [2], [3]][: len(seconds)], seconds)
