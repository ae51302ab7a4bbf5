"""Trades between two parts against trying all of them."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from odc.balance import loops
from odc.balance.state import SPLIT, Rules, State, new_state

SPEEDS = st.sampled_from([1.0, 0.5, 0.8])
SAMPLES = st.lists(st.tuples(st.integers(0, 60), st.booleans()), min_size=1, max_size=10)


def two_parts(samples: list[tuple[int, bool]], speeds: tuple[float, float], rooms: tuple[int, int]) -> State:
    falling = sorted(samples, reverse=True)
    costs = np.array([cost for cost, _ in falling], np.int64)
    nothing = np.zeros(len(costs), np.int64)
    limits = np.zeros(2, np.int64)
    state = new_state(
        costs, nothing, nothing + 1, 1 / np.array(speeds), limits, np.array(rooms, np.int64), arrays=False
    )
    loops.put(state, [int(second) for _, second in falling])
    return state


def ends(state: State) -> list[float]:
    return [load * slow for load, slow in zip(state.loads, state.slowness, strict=True)]


def members(state: State) -> list[list[int]]:
    owners = [-1] * len(state.costs)
    loops.get(state, owners)
    return [[i for i, owner in enumerate(owners) if owner == part] for part in (0, 1)]


def check(state: State) -> None:
    for part, held in enumerate(members(state)):
        assert state.loads[part] == sum(state.costs[i] for i in held)
        assert state.used[part] == len(held) <= state.rooms[part]


@given(SAMPLES, SPEEDS, SPEEDS, st.booleans())
def test_split_finds_the_best_division(samples, speed, other, counts):
    state = two_parts(samples, (speed, other), (99, 99))
    late = int(ends(state)[1] > ends(state)[0])
    before, size, n = max(ends(state)), len(members(state)[late]), len(samples)
    total = sum(state.costs)
    best = min(
        max(held * state.slowness[late], (total - held) * state.slowness[1 - late])
        for many in ([size] if counts else range(n + 1))
        for some in combinations(range(n), many)
        for held in [sum(state.costs[i] for i in some)]
    )
    traded = loops.split(state, late, 1 - late, Rules(0.0, counts=counts), False)
    check(state)
    assert max(ends(state)) == (min(before, best) if n > 1 else before)
    assert traded == (max(ends(state)) < before)
    assert not counts or len(members(state)[late]) == size


@given(SAMPLES, SPEEDS, SPEEDS, st.booleans(), st.integers(0, 2))
def test_swap_finds_the_best_trade(samples, speed, other, counts, spare):
    sizes = [sum(1 for _, second in samples if second == part) for part in (False, True)]
    rooms = (sizes[0] + spare, sizes[1] + spare)
    state = two_parts(samples, (speed, other), rooms)
    late = int(ends(state)[1] > ends(state)[0])
    before, held = max(ends(state)), members(state)
    nothing = [] if counts else [None]
    best = before
    for give in held[late] + nothing:
        for take in held[1 - late] + nothing:
            moved = (0 if give is None else state.costs[give]) - (0 if take is None else state.costs[take])
            grown = (give is not None) - (take is not None)
            if sizes[1 - late] + grown <= rooms[1 - late] and sizes[late] - grown <= rooms[late]:
                late_end = (state.loads[late] - moved) * state.slowness[late]
                best = min(best, max(late_end, (state.loads[1 - late] + moved) * state.slowness[1 - late]))
    loops.swap(state, late, 1 - late, Rules(0.0, counts=counts, reach=99))
    check(state)
    assert max(ends(state)) == best


def test_spread_divides_some_of_every_cost():
    samples = [(1 << bit, bit == 31) for bit in range(32)]
    state = two_parts(samples, (1.0, 1.0), (99, 99))
    assert loops.split(state, 1, 0, Rules(0.0), False) is False, "none of the cheapest can help"
    few = two_parts(samples[:SPLIT], (1.0, 1.0), (99, 99))
    assert loops.split(few, 0, 1, Rules(0.0), True) is False, "these were divided before"
    even = [(100, True)] * 2 + [(60, False)] * 2 + [(1, False)] * 20
    state = two_parts(even, (1.0, 1.0), (99, 99))
    assert loops.split(state, 1, 0, Rules(0.0), True)
    check(state)
    assert max(ends(state)) < 200


def test_more_samples_than_can_be_divided_keep_the_costliest():
    samples = [(100, False), (90, False)] + [(n, False) for n in range(1, SPLIT + 1)]
    state = two_parts(samples, (1.0, 1.0), (99, 99))
    assert loops.split(state, 0, 1, Rules(0.0), False)
    check(state)
    assert {0, 1} <= set(members(state)[0])
    assert state.loads == [190, 136]


@given(st.lists(st.integers(0, 99), min_size=1, max_size=30), st.integers(1, 6))
def test_longest_first_is_that(costs, parts):
    costs = sorted(costs, reverse=True)
    nothing = np.zeros(max(len(costs), parts), np.int64)
    state = new_state(
        np.array(costs, np.int64), nothing[: len(costs)], nothing[: len(costs)], np.ones(parts),
        nothing[:parts], nothing[:parts], arrays=False,
    )  # fmt: skip
    loops.longest_first(state, parts.bit_length())
    expected = [0] * parts
    for cost in costs:
        expected[expected.index(min(expected))] += cost
    assert state.loads == expected
