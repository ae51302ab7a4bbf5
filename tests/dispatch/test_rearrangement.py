"""The group of rearrangements: inverse, composition, lifting, and that arrays agree with nested lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.doubles import random_move

from odc.dispatch import Rearrangement
from odc.errors import PlanError

worlds, seeds = st.integers(1, 6), st.integers(0, 1 << 20)


def named(counts: list[int]) -> list[list[tuple[int, int]]]:
    """Examples that hold where they come from."""
    return [[(i, slot) for slot in range(count)] for i, count in enumerate(counts)]


@given(worlds, seeds)
def test_apply_does_what_the_arrays_say(world: int, seed: int) -> None:
    move = random_move(world, 5, seed)
    assert sorted(move.order.tolist()) == list(range(len(move.order)))
    got = move.apply(named(move.counts.tolist()))
    assert [len(batch) for batch in got] == move.new_counts.tolist()
    flat = [example for batch in named(move.counts.tolist()) for example in batch]
    for i in range(world):
        assert got[i] == [flat[place] for place in move.arriving(i)]
        assert [move.sources[place] for place in move.arriving(i)] == [source for source, _ in got[i]]


@given(worlds, seeds)
def test_the_inverse_takes_everything_back(world: int, seed: int) -> None:
    move = random_move(world, 5, seed)
    batches = named(move.counts.tolist())
    assert move.inverse().apply(move.apply(batches)) == batches
    assert move.inverse().inverse() == move
    assert move.inverse().compose(move) == Rearrangement.identity(move.counts)


@given(worlds, seeds)
def test_a_composition_is_one_after_the_other(world: int, seed: int) -> None:
    first = random_move(world, 5, seed)
    draw = np.random.default_rng(seed + 1)
    second = Rearrangement.to(first.new_counts, draw.integers(0, world, len(first.order)))
    batches = named(first.counts.tolist())
    assert second.compose(first).apply(batches) == second.apply(first.apply(batches))


@given(worlds, seeds)
def test_parts_go_where_their_examples_go(world: int, seed: int) -> None:
    move = random_move(world, 4, seed)
    parts = np.random.default_rng(seed).integers(0, 4, len(move.order))
    places = np.concatenate([[0], np.cumsum(parts)])
    of = iter(range(len(parts)))
    whole = [[[(i, k) for k in range(parts[i])] for i in (next(of) for _ in range(count))] for count in move.counts]
    flat = [[part for example in batch for part in example] for batch in whole]
    expected = [[part for example in batch for part in example] for batch in move.apply(whole)]
    lifted = move.lift(parts)
    assert sorted(lifted.order.tolist()) == list(range(len(lifted.order)))
    assert lifted.apply(flat) == expected
    assert lifted.counts.sum() == places[-1]


@given(worlds, seeds)
def test_relabelled_batches_are_the_same_elsewhere(world: int, seed: int) -> None:
    move = random_move(world, 4, seed)
    places = np.random.default_rng(seed).permutation(world)
    batches = named(move.counts.tolist())
    before, after = move.apply(batches), move.relabel(places).apply(batches)
    assert [after[places[i]] for i in range(world)] == before


@given(worlds, seeds)
def test_what_leaves_a_node_is_counted_once(world: int, seed: int) -> None:
    move = random_move(world, 5, seed)
    sizes = np.random.default_rng(seed).integers(0, 100, len(move.order))
    expected = np.zeros((world, world), int)
    flat = iter(sizes.tolist())
    size_of = {(i, slot): next(flat) for i, count in enumerate(move.counts) for slot in range(count)}
    for owner, batch in enumerate(move.apply(named(move.counts.tolist()))):
        for source in batch:
            expected[source[0], owner] += size_of[source]
    node = np.arange(world) // 2
    away = np.where(node[:, None] != node[None, :], expected, 0).sum(axis=1)
    assert np.array_equal(move.between_nodes(sizes, 2), away)


def test_what_is_no_rearrangement_is_refused() -> None:
    with pytest.raises(PlanError, match="3 examples leave, 2 arrive"):
        Rearrangement(np.array([1, 2]), np.array([1, 1]), np.arange(3))
    with pytest.raises(PlanError, match="outside the 2 instances"):
        Rearrangement.to([1, 1], [0, 2])
    with pytest.raises(PlanError, match="cannot compose"):
        Rearrangement.identity([2, 1]).compose(Rearrangement.identity([1, 2]))
    with pytest.raises(PlanError, match="permutation of 2"):
        Rearrangement.identity([1, 1]).relabel([0, 0])
    with pytest.raises(PlanError, match="mini-batches of"):
        Rearrangement.identity([1, 1]).apply([[1], []])
