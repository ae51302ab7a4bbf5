"""Post-balancing against brute force, against its bounds, with and without numba, and what it refuses."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from functools import lru_cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import up_to

from odc.balance.compiled import loops_of
from odc.dispatch import BalancePolicy, Rearrangement, post_balance
from odc.dispatch.policy import balance_flat
from odc.errors import PlanError

POLICIES = {
    "1": BalancePolicy(),
    "1, attention is free": BalancePolicy("attention"),
    "2": BalancePolicy("full"),
    "2, quadratic": BalancePolicy("full", beta=0.02),
    "4": BalancePolicy(beta=0.02),
    "4, tolerance": BalancePolicy(beta=0.02, tolerance=8),
    "5": BalancePolicy("attention", beta=0.02),
}
few = st.lists(st.integers(1, 60), min_size=0, max_size=7)


def latest(lengths: np.ndarray, owners: np.ndarray, instances: int, policy: BalancePolicy) -> float:
    return max(policy.cost(lengths[owners == i]) for i in range(instances))


@lru_cache(maxsize=4096)
def optimum(lengths: tuple[int, ...], instances: int, policy: BalancePolicy) -> float:
    """By trying everything."""
    values = np.array(lengths, np.int64)
    tried = (np.array(owners, np.int64) for owners in product(range(instances), repeat=len(lengths)))
    return min((latest(values, owners, instances, policy) for owners in tried), default=0.0)


def reference(lengths: list[int], policy: BalancePolicy) -> float:
    """Paper equation 2 and appendix A, term by term."""
    if not lengths:
        return 0.0
    b, longest = len(lengths), max(lengths)
    if policy.padding == "full":
        total = b * longest
        return policy.alpha * total + policy.beta * total**2 / b
    squares = b * longest**2 if policy.padding == "attention" else sum(length**2 for length in lengths)
    return policy.alpha * sum(lengths) + policy.beta * squares


@given(few, st.sampled_from(sorted(POLICIES)))
def test_costs_are_those_of_the_paper(lengths: list[int], name: str) -> None:
    assert POLICIES[name].cost(lengths) == pytest.approx(reference(lengths, POLICIES[name]))


@pytest.mark.parametrize("name", POLICIES)
def test_each_policy_names_its_algorithm(name: str) -> None:
    assert POLICIES[name].algorithm == int(name[0])


@settings(max_examples=up_to(60))
@given(few, st.integers(1, 3))
@pytest.mark.parametrize("name", ["2", "2, quadratic"])
def test_padded_batches_are_the_best_there_are(name: str, lengths: list[int], instances: int) -> None:
    policy, values = POLICIES[name], np.array(lengths, np.int64)
    owners = balance_flat(values, instances, policy)
    assert latest(values, owners, instances, policy) == pytest.approx(optimum(tuple(lengths), instances, policy))


@settings(max_examples=up_to(60))
@given(few, st.integers(1, 3))
@pytest.mark.parametrize("name", ["1", "1, attention is free", "4"])
def test_packed_batches_keep_grahams_bound(name: str, lengths: list[int], instances: int) -> None:
    policy, values = POLICIES[name], np.array(lengths, np.int64)
    owners = balance_flat(values, instances, policy)
    least = optimum(tuple(lengths), instances, policy)
    assert latest(values, owners, instances, policy) <= (4 / 3 - 1 / (3 * instances)) * least * (1 + 1e-9)


@settings(max_examples=up_to(60))
@given(few, st.integers(1, 3))
def test_attention_padding_stays_within_twice_the_best_where_it_can_be_tried(
    lengths: list[int], instances: int
) -> None:
    policy, values = POLICIES["5"], np.array(lengths, np.int64)
    owners = balance_flat(values, instances, policy)
    assert latest(values, owners, instances, policy) <= 2 * optimum(tuple(lengths), instances, policy) + 1e-9


@pytest.mark.parametrize("lengths", [[3, 3, 2, 2, 2], [5, 5, 4, 4, 3, 3, 3], [7, 7, 6, 6, 5, 5, 4, 4, 4]])
@pytest.mark.parametrize("beta", [0.0, 1e-9])
def test_packed_batches_are_evened_out_where_longest_first_leaves_them_uneven(lengths: list[int], beta: float) -> None:
    """Graham's worst cases: longest first onto the lightest leaves one instance 17 to 25% above the others."""
    instances = len(lengths) // 2
    owners = balance_flat(np.array(lengths), instances, BalancePolicy(beta=beta))
    sums = np.bincount(owners, weights=lengths, minlength=instances)
    assert sums.tolist() == [sum(lengths) / instances] * instances


@pytest.mark.parametrize("lengths", [[9, 10, 15, 18, 2], [17, 20, 1, 1, 17], [12, 3, 3, 14, 1, 15, 17, 4]])
def test_attention_padding_beats_every_cut_of_the_rising_lengths_where_the_listing_does(lengths: list[int]) -> None:
    """Short examples fill the batches, the longest lie on top: no batch is a run of the lengths in rising order."""
    policy, values = POLICIES["5"], np.array(lengths, np.int64)
    rising = np.sort(values)
    runs = [max(policy.cost(rising[:cut]), policy.cost(rising[cut:])) for cut in range(len(lengths) + 1)]
    assert latest(values, balance_flat(values, 2, policy), 2, policy) < 0.96 * min(runs)


@settings(max_examples=up_to(60))
@given(st.lists(st.integers(1, 500), min_size=1, max_size=300), st.integers(1, 20), st.integers(1, 200))
def test_tolerance_lets_sums_differ_by_that_much(lengths: list[int], instances: int, tolerance: int) -> None:
    policy = BalancePolicy(beta=1.0, tolerance=tolerance)
    owners = balance_flat(np.array(lengths), instances, policy)
    sums = np.bincount(owners, weights=lengths, minlength=instances)
    assert sums.max() <= sum(lengths) / instances + max(lengths) + tolerance


def test_within_the_tolerance_squares_decide() -> None:
    lengths = np.array([100, 60, 40, 10])
    near = balance_flat(lengths, 2, BalancePolicy(beta=1.0, tolerance=50))
    assert near.tolist() == [0, 1, 1, 1], "sums of 100 both: the one with the smaller squares gets the last"
    assert balance_flat(np.array([100, 60, 41, 10]), 2, BalancePolicy(beta=1.0, tolerance=1)).tolist() == [0, 1, 1, 0]


@settings(max_examples=up_to(40))
@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=400),
    st.integers(1, 40),
    st.sampled_from(["1", "2", "2, quadratic", "4"]),
)
def test_bounds_hold_on_random_lengths(lengths: list[int], instances: int, name: str) -> None:
    """Against lower bounds on the optimum: the mean, and the costliest example."""
    policy, values = POLICIES[name], np.array(lengths, np.int64)
    found = latest(values, balance_flat(values, instances, policy), instances, policy)
    single = np.array([policy.cost([length]) for length in lengths])
    if policy.padding == "full":
        # Some bound below which d runs are too few: the next smaller value of size x costliest that was possible.
        assert found >= max(single.max(), single.sum() / instances) * (1 - 1e-9)
        assert found <= single.max() * math.ceil(len(lengths) / instances) * (1 + 1e-9)
    else:
        assert found <= (single.sum() - single.max()) / instances + single.max() * (1 + 1e-9)


@settings(max_examples=up_to(40))
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=300), st.integers(1, 30))
def test_attention_padding_is_never_worse_than_padding_everything(lengths: list[int], instances: int) -> None:
    values = np.array(lengths, np.int64)
    policy, full = BalancePolicy("attention", beta=0.01), BalancePolicy("full", beta=0.01)
    found = latest(values, balance_flat(values, instances, policy), instances, policy)
    assert found <= latest(values, balance_flat(values, instances, full), instances, full) * (1 + 2e-5)


def lengths_of(kind: str) -> Iterator[np.ndarray]:
    draw = np.random.default_rng(7)
    for n in (0, 1, 5, 130, 700):
        values = np.clip(draw.lognormal(5, 1, n), 1, 4000).astype(np.int64)
        if kind == "giant" and n:
            values[n // 2] = 1_000_000
        yield values if kind != "equal" else np.full(n, 77)


@pytest.mark.parametrize("kind", ["skewed", "giant", "equal"])
@pytest.mark.parametrize("name", POLICIES)
def test_plans_are_the_same_without_numba(monkeypatch: pytest.MonkeyPatch, name: str, kind: str) -> None:
    pytest.importorskip("numba")
    np.testing.assert_array_equal(balance_flat(np.arange(1, 2000), 8, POLICIES[name]).shape, (1999,))
    for values in lengths_of(kind):
        for instances in (1, 3, 16):
            with_numba = balance_flat(values, instances, POLICIES[name])
            with monkeypatch.context() as patch:
                for module in ("odc.balance.compiled", "odc.balance.partition"):
                    patch.setattr(sys.modules[module], "loops_of", lambda source, samples: (source, False))
                without = balance_flat(values, instances, POLICIES[name])
            assert np.array_equal(with_numba, without)
            assert with_numba.dtype == np.int64


def test_the_compiled_loops_were_used() -> None:
    pytest.importorskip("numba")
    assert loops_of(sys.modules["odc.dispatch.algorithm_loops"], 10_000)[1]


def test_mini_batches_are_rearranged_as_a_whole() -> None:
    lengths = [[10, 20], [], [500], [30, 40, 50]]
    move = post_balance(lengths, BalancePolicy())
    assert isinstance(move, Rearrangement)
    assert sorted(move.order.tolist()) == list(range(len(move.order)))
    assert max(map(sum, move.apply(lengths))) == 500
    assert sorted(sum(batch) for batch in move.apply(lengths)) == [50, 50, 50, 500]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([[1], [2, math.nan]], "instance 1: example 1 has length nan"),
        ([[1], [2, -3]], "instance 1: example 1 has length -3"),
        ([[1, 0], [2]], "instance 0: example 1 has length 0"),
        ([[1], [], [2.5]], "instance 2: example 0 has length 2.5"),
        ([[1], [101]], "instance 1: example 0 has length 101, more than the cap of 100"),
        ([[1], [math.inf]], "instance 1: example 0 has length inf, more than the cap of 100"),
        ([[1], ["2"]], "instance 1: lengths must be one list of integers"),
        ([[1], [[2]]], "instance 1: lengths must be one list of integers"),
        ([], "no instances"),
    ],
)
def test_bad_lengths_are_refused_by_name(lengths: list[list[float]], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        post_balance(lengths, BalancePolicy(longest=100))


@pytest.mark.parametrize(
    "bad",
    [
        {"padding": "some"},
        {"alpha": 0.0},
        {"alpha": math.nan},
        {"beta": -1.0},
        {"beta": math.inf},
        {"tolerance": 5},
        {"beta": 1.0, "tolerance": 0},
        {"padding": "full", "beta": 1.0, "tolerance": 5},
        {"longest": 0},
    ],
)
def test_bad_policies_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(PlanError):
        BalancePolicy(**bad)  # type: ignore[arg-type]
