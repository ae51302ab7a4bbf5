"""Least-load-first against a heap of loads from which full parts are taken and put back."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odc.balance import search
from odc.balance.compiled import loops_of

SAMPLES = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), max_size=60)


def by_heap(costs: Sequence[float], sizes: Sequence[int], room: int, parts: int) -> list[int] | None:
    """The part of every sample, None where one fits nowhere."""
    used = [0] * parts
    heap, owners = [(0.0, part) for part in range(parts)], list[int]()
    for cost, size in zip(costs, sizes, strict=True):
        full = []
        while heap and used[heap[0][1]] + size > room:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        load, chosen = heapq.heappop(heap)
        owners.append(chosen)
        used[chosen] += size
        for entry in (*full, (load + cost, chosen)):
            heapq.heappush(heap, entry)
    return owners


def by_scan(costs: Sequence[float], sizes: Sequence[int], room: int, parts: int) -> list[int] | None:
    owners = [-1] * len(costs)
    found = search.least_load_first(costs, sizes, room, [0.0] * parts, [0] * parts, owners)
    return owners if found else None


@given(SAMPLES, st.integers(1, 9), st.integers(20, 90), st.sampled_from([1.0, 0.1, 1 / 3]))
def test_the_plan_is_that_of_a_heap(samples: list[tuple[int, int]], parts: int, room: int, unit: float) -> None:
    """Costs whose sums round differ in their last bits with the order of adding: it is the same."""
    costs, sizes = [unit * cost for cost, _ in samples], [size for _, size in samples]
    assert by_scan(costs, sizes, room, parts) == by_heap(costs, sizes, room, parts)


@pytest.mark.parametrize("room", [4900, 6000, 9000])
def test_the_compiled_loop_gives_the_same(room: int) -> None:
    pytest.importorskip("numba", reason="needs numba: pip install 'odc-fsdp[fast]'")
    draw = random.Random(3)
    sizes = [draw.randint(1, 1000) for _ in range(400)]
    costs = [24576.0 * size + size * size / 3 for size in sizes]
    expected = by_heap(costs, sizes, room, 40)
    loops, arrays = loops_of(search, 1000)
    owners = np.full(400, -1)
    assert arrays, "numba is there and not used"
    found = loops.least_load_first(np.array(costs), np.array(sizes), room, np.zeros(40), np.zeros(40, np.int64), owners)
    assert (owners.tolist() if found else None) == expected
    assert (expected is None) == (room == 4900), "one case that fits nowhere, and two that do"
