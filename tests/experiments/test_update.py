from __future__ import annotations

from itertools import pairwise

import pytest

from odc.experiments.update import learning_rate


def _rates(steps: int, warmup: int) -> list[float]:
    return [learning_rate(s, steps=steps, peak=2.0, warmup=warmup, floor=0.1) for s in range(steps)]


def test_it_rises_to_the_peak_and_falls_to_the_floor() -> None:
    rates = _rates(steps=21, warmup=5)
    assert rates[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert rates[5] == 2.0
    assert rates[-1] == pytest.approx(0.2)
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[12] > 1.1 > rates[13]  # the middle between peak and floor is crossed half way


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (3, 3), (2, 1)])
def test_short_jobs_have_a_rate_above_zero_at_every_step(steps: int, warmup: int) -> None:
    assert all(0 < rate <= 2.0 for rate in _rates(steps, warmup))


def test_a_line_falls_by_the_same_each_step_and_a_constant_stays() -> None:
    shape = {"steps": 21, "peak": 2.0, "warmup": 5, "floor": 0.1}
    line = [learning_rate(step, **shape, schedule="linear") for step in range(21)]
    assert line[:6] == _rates(steps=21, warmup=5)[:6] and line[-1] == pytest.approx(0.2)
    assert [a - b for a, b in pairwise(line[5:])] == pytest.approx([1.8 / 15] * 15)
    assert {learning_rate(step, **shape, schedule="constant") for step in range(5, 21)} == {2.0}
