"""The partition engine: against Karmarkar-Karp, longest-first and HiGHS, and the same compiled and interpreted."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.highs import shortest_longest

from odc.balance import compiled, lower_bound, partition
from odc.balance.karmarkar_karp import karmarkar_karp
from odc.balance.state import Ints
from odc.errors import PlanError

Draw = Callable[[np.random.Generator, int], np.ndarray]


def _lognormal(mean: float, sigma: float, cap: int) -> Draw:
    location = float(np.log(mean) - sigma**2 / 2)
    return lambda rng, n: np.minimum(cap, rng.lognormal(location, sigma, n))


DISTRIBUTIONS: dict[str, Draw] = {
    "LongAlign-like": _lognormal(20000, 1.0, 65536),
    "SWE-Smith-like, 32K": lambda rng, n: np.minimum(32768, rng.normal(26000, 6500, n)),
    "SWE-Smith-like, 128K": _lognormal(36000, 0.6, 131072),
    "GRPO-like": _lognormal(2100, 0.9, 8192),
    "AIME-like": lambda rng, n: 16384 * rng.beta(1.8, 1.4, n),
    "uniform": lambda rng, n: rng.uniform(1, 4096, n),
    "exponential": lambda rng, n: rng.exponential(3000, n),
    "two lengths": lambda rng, n: np.where(rng.random(n) < 0.2, 30011, 2003),
    "Pareto": lambda rng, n: np.minimum(1 << 20, 500 * (1 + rng.pareto(1.1, n))),
}


def draw_lengths(name: str, samples: int, seed: int) -> Ints:
    """Lengths >= 1 of one of DISTRIBUTIONS."""
    values = DISTRIBUTIONS[name](np.random.default_rng(seed), samples)
    return np.maximum(1, values).astype(np.int64)


COSTS = st.lists(st.integers(0, 1000), min_size=1, max_size=40)


def loads(costs, owners, parts: int) -> np.ndarray:
    return np.bincount(owners, weights=np.asarray(costs, np.float64), minlength=parts)


def longest_first(costs: np.ndarray, parts: int) -> float:
    heap = [0.0] * parts
    for cost in np.sort(costs)[::-1].tolist():
        heapq.heapreplace(heap, heap[0] + cost)
    return max(heap)


def largest_differencing(costs: np.ndarray, parts: int) -> float:
    order = np.argsort(-costs, kind="stable").tolist()
    values = costs.tolist()
    return max(sum(values[i] for i in part) for part in karmarkar_karp(values, parts, order))


@given(COSTS, st.integers(1, 9), st.booleans())
@settings(deadline=None)
def test_every_sample_once_never_below_the_bound_and_sizes_on_request(costs, parts, equal_sizes):
    owners = partition(costs, parts, equal_sizes=equal_sizes)
    assert owners.shape == (len(costs),) and owners.min() >= 0 and owners.max() < parts
    assert loads(costs, owners, parts).max() >= lower_bound(costs, parts) * (1 - 1e-12)
    sizes = np.bincount(owners, minlength=parts)
    assert not equal_sizes or sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("quadratic", [False, True], ids=["linear", "quadratic"])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_within_a_thousandth_of_the_better_of_differencing_and_longest_first(name: str, quadratic: bool):
    for samples, parts, seed in ((16, 8, 0), (24, 4, 1), (64, 8, 2), (64, 8, 3), (128, 32, 4), (512, 64, 5)):
        lengths = draw_lengths(name, samples, seed)
        costs = 24576 * lengths + lengths**2 if quadratic else lengths
        best = min(longest_first(costs, parts), largest_differencing(costs, parts))
        assert loads(costs, partition(costs, parts), parts).max() <= best * 1.001


@pytest.mark.thorough
def test_two_hundred_small_instances_within_half_a_percent_of_the_optimum():
    draw = random.Random(0)
    above = []
    for number in range(200):
        parts = draw.randint(2, 4)
        samples = draw.randint(parts + 1, 10)
        lengths = draw_lengths(list(DISTRIBUTIONS)[number % 9], samples, number)
        costs = (lengths * (24576 + lengths) / 1e6).round(3).tolist() if number % 2 else lengths.tolist()
        best = shortest_longest(costs, parts)
        above.append(loads(costs, partition(costs, parts), parts).max() / best - 1)
    assert len(above) == 200
    assert min(above) > -1e-5
    assert max(above) <= 0.005


def problems(draw: random.Random, samples: int) -> list[dict]:
    parts = draw.randint(2, 9)
    costs = [draw.randint(0, 10**6) for _ in range(samples)]
    needs = [draw.randint(1, 100) for _ in range(samples)]
    speeds = [draw.choice([0.3, 0.5, 1.0]) for _ in range(parts)]
    limits = [100, *(draw.choice([60, 100]) for _ in range(parts - 1))]
    plain = {"costs": costs, "parts": parts}
    return [
        plain,
        plain | {"equal_sizes": True},
        plain | {"speeds": speeds},
        plain | {"speeds": speeds, "equal_sizes": True},
        plain | {"speeds": speeds, "needs": needs, "limits": limits},
    ]


@pytest.mark.parametrize("samples", [5, 14, 23, 40, 300, 700])
def test_same_partition_compiled_and_interpreted(samples: int, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("numba", reason="needs the fast extra")
    draw = random.Random(samples)
    for problem in problems(draw, samples):
        monkeypatch.setattr(compiled, "WORTH", 0)
        assert compiled.loops_of(partition.__globals__["_loops"], samples)[1]
        fast = partition(**problem)
        monkeypatch.setattr(compiled, "_numba", lambda: None)
        assert not compiled.loops_of(partition.__globals__["_loops"], samples)[1]
        plain = partition(**problem)
        monkeypatch.undo()
        assert (fast == plain).all()


def test_permuting_samples_changes_nothing_but_names():
    lengths = draw_lengths("uniform", 200, 0)
    shuffle = np.random.default_rng(1).permutation(200)
    one, other = partition(lengths, 7), partition(lengths[shuffle], 7)
    assert sorted(lengths[one == p].tolist() for p in range(7))  # parts hold something
    for part in range(7):
        assert sorted(lengths[one == part]) == sorted(lengths[shuffle][other == part])


def test_ties_choose_among_equals_only():
    costs = np.array([5, 5, 5, 5, 9, 9])
    found = {tuple(partition(costs, 3, ties=np.random.default_rng(s).permutation(6))) for s in range(8)}
    assert len(found) > 1
    assert len({tuple(loads(costs, np.array(owners), 3)) for owners in found}) == 1


def test_unequal_speeds_against_the_optimum():
    draw = random.Random(1)
    for _ in range(25):
        parts = draw.randint(2, 3)
        costs = [draw.randint(1, 500) for _ in range(draw.randint(parts, 9))]
        speeds = [draw.choice([0.5, 0.8, 1.0]) for _ in range(parts)]
        owners = partition(costs, parts, speeds=speeds)
        latest = (loads(costs, owners, parts) / speeds).max()
        best = shortest_longest(costs, parts, speeds)
        assert lower_bound(costs, parts, speeds=speeds) <= best * (1 + 1e-6)
        assert latest <= best * 1.005


def test_a_part_holds_only_what_its_limit_allows():
    draw = random.Random(2)
    for equal_sizes in (False, True):
        needs = [draw.randint(1, 100) for _ in range(60)]
        owners = partition(needs, 4, needs=needs, limits=[100, 100, 60, 95], equal_sizes=equal_sizes)
        assert all(need <= (100, 100, 60, 95)[owner] for need, owner in zip(needs, owners, strict=True))
    with pytest.raises(PlanError, match="no part may hold sample 1"):
        partition([1, 1], 2, needs=[5, 9], limits=[8, 8])
    with pytest.raises(PlanError, match="as many samples"):
        partition([1, 1, 1, 1], 2, needs=[9, 9, 9, 1], limits=[9, 8], equal_sizes=True)


@pytest.mark.parametrize("costs", [[1.0, float("nan")], [1.0, float("inf")], [1.0, -2.0]])
def test_bad_costs_are_refused(costs: list[float]):
    with pytest.raises(PlanError, match="finite numbers >= 0"):
        partition(costs, 2)


def test_costs_of_any_size_and_none():
    assert partition([], 3).tolist() == []
    assert sorted(partition([0, 0], 3).tolist()) == sorted(partition([0.0, 0.0], 3).tolist())
    huge = [2.0**900, 2.0**900, 1.0]
    assert loads(huge, partition(huge, 2), 2).max() == 2.0**900
    tiny = [3e-300, 2e-300, 1e-300]
    assert loads(tiny, partition(tiny, 2), 2).max() == pytest.approx(3e-300)
    assert loads([2**60, 2**60 + 1], partition([2**60, 2**60 + 1], 2), 2).max() < 2**61


def test_equal_sizes_beat_differencing_of_equal_sizes():
    lengths = draw_lengths("LongAlign-like", 512, 0)
    costs = 24576 * lengths + lengths**2
    order = np.argsort(-costs, kind="stable").tolist()
    rival = karmarkar_karp(costs.tolist(), 64, order, equal_sizes=True)
    theirs = max(sum(costs[i] for i in part) for part in rival)
    evener = loads(costs, partition(costs, 64, equal_sizes=True), 64)
    assert evener.max() / evener.mean() < 1.001 < 1.05 < theirs / evener.mean()
