"""Node-wise placement against every permutation, HiGHS, and its own bounds."""

from __future__ import annotations

import sys
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.doubles import random_move
from support.extent import examples

from odc.dispatch import BalancePolicy, Rearrangement, node_wise, post_balance
from odc.errors import PlanError


def drawn(instances: int, each: int, seed: int) -> tuple[Rearrangement, np.ndarray]:
    """A balanced step of lognormal lengths."""
    lengths = np.clip(np.random.default_rng(seed).lognormal(6, 0.8, instances * each), 16, 8192).astype(np.int64)
    return post_balance(list(lengths.reshape(instances, each)), BalancePolicy()), lengths


def volume(move: Rearrangement, sizes: np.ndarray) -> np.ndarray:
    """[instances, instances] what each sends to each."""
    sent = np.zeros((move.instances, move.instances), np.int64)
    np.add.at(sent, (move.sources, move.owners), sizes)
    return sent


def best_of_all(move: Rearrangement, sizes: np.ndarray, per_node: int) -> int:
    found = (
        move.relabel(list(places)).between_nodes(sizes, per_node) for places in permutations(range(move.instances))
    )
    return min(int(sent.max()) for sent in found)


@settings(max_examples=examples(25))
@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 1 << 20))
def test_small_ones_against_every_permutation(instances: int, per_node: int, seed: int) -> None:
    move = random_move(instances, 5, seed)
    sizes = np.random.default_rng(seed).integers(0, 50, len(move.order))
    found = node_wise(move, sizes, per_node)
    assert found.rearrangement == move.relabel(found.places)
    assert found.cost == found.rearrangement.between_nodes(sizes, per_node).max()
    assert found.before == move.between_nodes(sizes, per_node).max()
    best = best_of_all(move, sizes, per_node)
    assert found.bound - 1e-6 <= best <= found.cost <= found.before


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_exchanges_come_within_five_percent_of_the_optimum(seed: int) -> None:
    pytest.importorskip("scipy")
    from support.highs import least_sent

    move, sizes = drawn(16, 20, seed)
    best = least_sent(volume(move, sizes), 4)
    found = node_wise(move, sizes, 4)
    assert found.bound <= best * (1 + 1e-5) and best * (1 - 1e-5) <= found.cost <= 1.05 * best


def test_within_nodes_batches_lie_where_most_of_them_is() -> None:
    """Two nodes of two: what instance 0 has goes to batch 1 and the other way round, within the node."""
    move = Rearrangement.to([4, 4, 4, 4], [1] * 4 + [0] * 4 + [3] * 4 + [2] * 4)
    found = node_wise(move, np.ones(16), 2)
    assert found.cost == found.before == 0
    assert np.trace(volume(found.rearrangement, np.ones(16, np.int64))) == 16, "nothing has to move at all"


def test_the_last_node_may_be_smaller() -> None:
    move, sizes = drawn(10, 6, 0)
    found = node_wise(move, sizes, 4)
    assert sorted(found.rearrangement.order.tolist()) == list(range(len(move.order)))
    assert found.bound <= found.cost <= found.before


def test_plans_are_the_same_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    move, sizes = drawn(24, 8, 3)
    with_numba = node_wise(move, sizes, 4)
    monkeypatch.setattr(sys.modules["odc.balance.compiled"], "loops_of", lambda source, samples: (source, False))
    without = node_wise(move, sizes, 4)
    assert np.array_equal(with_numba.places, without.places)
    assert (with_numba.cost, with_numba.bound) == (without.cost, without.bound)


def test_bad_input_is_refused() -> None:
    move = Rearrangement.identity([1, 1])
    with pytest.raises(PlanError, match="for each of 2 examples"):
        node_wise(move, [1], 1)
    with pytest.raises(PlanError, match="for each of 2 examples"):
        node_wise(move, [1, -1], 1)
    with pytest.raises(PlanError, match="at least one instance"):
        node_wise(move, [1, 1], 0)
