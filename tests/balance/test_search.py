"""The exact search against trying every placement."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from odc.balance.search import search
from odc.balance.state import new_tree

COSTS = st.lists(st.integers(0, 30), min_size=1, max_size=6)


def latest(costs: list[int], owners: Sequence[int], slowness: list[float]) -> float:
    times = [0.0] * len(slowness)
    for cost, owner in zip(costs, owners, strict=True):
        times[owner] += cost * slowness[owner]
    return max(times)


@given(COSTS, st.lists(st.sampled_from([1.0, 1.25, 2.0]), min_size=1, max_size=3), st.data(), st.booleans())
def test_finds_the_optimum_under_limits_and_quotas(costs, slowness, data, fullest):
    costs.sort(reverse=True)
    n, k = len(costs), len(slowness)
    needs = data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    limits = data.draw(st.lists(st.integers(1, 2), min_size=k, max_size=k))
    quotas = data.draw(st.lists(st.integers(1, n), min_size=k, max_size=k))
    best = float("inf")
    for owners in product(range(k), repeat=n):
        allowed = all(limits[o] >= need for o, need in zip(owners, needs, strict=True))
        if allowed and all(owners.count(part) <= quota for part, quota in enumerate(quotas)):
            best = min(best, latest(costs, owners, slowness))
    ints = (np.array(values, np.int64) for values in (costs, needs))
    tree = new_tree(*ints, np.array(slowness), np.array(limits), np.array(quotas), arrays=False)
    owners = [-1] * n
    found = search(tree, owners, 1e9, 0.0, 0.0, fullest, 10**6)
    assert found == min(best, 1e9)
    if best < 1e9:
        assert latest(costs, owners, slowness) == found


def test_steps_bound_the_work():
    for steps, found in ((19, 1e9), (20, 54.0)):
        tree = new_tree(np.arange(20, 0, -1), np.zeros(20, np.int64), np.ones(4), *np.full((2, 4), 99), arrays=False)
        assert search(tree, [0] * 20, 1e9, 0.0, 0.0, False, steps) == found
