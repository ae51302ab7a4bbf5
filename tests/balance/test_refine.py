"""Refinement: keeps the samples, never lifts the costliest load, keeps the cap, and finds what one exchange can."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from odc.balance.partition import refine

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=40)


def loads(parts: list[list[int]], costs: list[float]) -> list[float]:
    return [sum(costs[i] for i in part) for part in parts]


def freely(parts: list[list[int]], costs: list[float], worth: float = 0.0) -> list[list[int]]:
    """Refined where every part has room for all samples."""
    return refine(parts, costs, lengths=[1] * len(costs), max_tokens=len(costs), worth=worth)


@given(LENGTHS, st.integers(1, 6), st.randoms(use_true_random=False))
def test_keeps_samples_cap_and_longest(lengths: list[int], count: int, rng):
    costs = [float(n * n) for n in lengths]
    parts: list[list[int]] = [[] for _ in range(count)]
    for i in range(len(lengths)):
        parts[rng.randrange(count)].append(i)
    cap = max(sum(lengths[i] for i in part) for part in parts)
    refined = refine(parts, costs, lengths=lengths, max_tokens=cap)
    assert sorted(i for part in refined for i in part) == list(range(len(lengths)))
    assert max(sum(lengths[i] for i in part) for part in refined) <= cap
    assert max(loads(refined, costs)) <= max(loads(parts, costs))
    falling = [sorted(loads(p, costs), reverse=True) for p in (parts, refined)]
    assert falling[1] <= falling[0]


def test_moves_and_swaps():
    assert max(loads(freely([[0, 1], []], [3.0, 2.0]), [3.0, 2.0])) == 3.0
    costs = [5.0, 4.0, 4.0, 1.0]
    assert sorted(loads(freely([[0, 1], [2, 3]], costs), costs)) == [6.0, 8.0]


def test_cap_forbids_the_move_that_cost_wants():
    lengths, costs = [4, 4, 4], [9.0, 9.0, 1.0]
    free = freely([[0, 1], [2]], costs)
    capped = refine([[0, 1], [2]], costs, lengths=lengths, max_tokens=4 * 2 - 1)
    assert sorted(loads(free, costs)) == [9.0, 10.0]
    assert max(sum(lengths[i] for i in part) for part in capped) <= 8


def test_worth_leaves_small_gains_alone():
    parts, costs = [[0, 1], [2]], [50.0, 1.0, 50.0]
    assert freely(parts, costs, worth=0.05) == parts
    assert freely([[0, 1], [2, 3]], [50.0, 2.0, 49.0, 1.0], worth=0.01) != [[0, 1], [2, 3]]


def test_trades_go_on_below_the_costliest():
    costs = [100.0, 3.0, 2.0]
    assert sorted(loads(freely([[0], [1, 2], []], costs), costs)) == [2.0, 3.0, 100.0]
