"""Trades between two parts against trying all of them."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from odc.balance import partition_loops as loops
from odc.balance.state import SPLIT, Assignment, Rules, new_assignment

SPEEDS = st.sampled_from([1.0, 0.5, 0.8])
SAMPLES = st.lists(st.tuples(st.integers(0, 60), st.booleans()), min_size=1, max_size=10)


def two_parts(samples: list[tuple[int, bool]], speeds: tuple[float, float], rooms: tuple[int, int]) -> Assignment:
    falling = sorted(samples, reverse=True)
    costs = np.array([cost for cost, _ in falling], np.int64)
    state = new_assignment(
        costs, 1 / np.array(speeds), sizes=np.ones(len(costs), np.int64), rooms=np.array(rooms, np.int64), arrays=False
    )
    loops.put(state, [int(second) for _, second in falling])
    return state


def ends(state: Assignment) -> list[float]:
    return [load * slow for load, slow in zip(state.loads, state.slowness, strict=True)]


def members(state: Assignment) -> list[list[int]]:
    owners = [-1] * len(state.costs)
    loops.get(state, owners)
    return [[i for i, owner in enumerate(owners) if owner == part] for part in (0, 1)]


def check(state: Assignment) -> None:
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
    traded = loops.split(state, late, 1 - late, Rules(0.0, counts=counts))
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


def test_more_samples_than_can_be_divided_keep_the_costliest():
    samples = [(100, False), (90, False)] + [(n, False) for n in range(1, SPLIT + 1)]
    state = two_parts(samples, (1.0, 1.0), (99, 99))
    assert loops.split(state, 0, 1, Rules(0.0))
    check(state)
    assert {0, 1} <= set(members(state)[0])
    assert state.loads == [190, 136]


@given(st.lists(st.integers(0, 99), min_size=1, max_size=30), st.integers(1, 6))
def test_longest_first_is_that(costs, parts):
    costs = sorted(costs, reverse=True)
    state = new_assignment(np.array(costs, np.int64), np.ones(parts), arrays=False)
    loops.longest_first(state, parts.bit_length())
    expected = [0] * parts
    for cost in costs:
        expected[expected.index(min(expected))] += cost
    assert state.loads == expected
