"""Karmarkar-Karp: the textbook example, sizes, and a plain reference with full tuples."""

from __future__ import annotations

import heapq

from hypothesis import given
from hypothesis import strategies as st

from odc.balance.karmarkar_karp import karmarkar_karp

COSTS = st.lists(st.integers(0, 1000).map(float), min_size=1, max_size=40)


def falling(costs: list[float]) -> list[int]:
    return sorted(range(len(costs)), key=lambda i: -costs[i])


def loads(parts: list[list[int]], costs: list[float]) -> list[float]:
    return [sum(costs[i] for i in part) for part in parts]


def reference_loads(costs: list[float], parts: int) -> list[float]:
    """Largest differencing on k-wide tuples of sums, no samples kept."""
    heap = [(-c, n, [c] + [0.0] * (parts - 1)) for n, c in enumerate(sorted(costs, reverse=True))]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = sorted((a + b for a, b in zip(first, reversed(second), strict=True)), reverse=True)
        heapq.heappush(heap, (merged[-1] - merged[0], number, merged))
        number += 1
    return heap[0][2]


def test_textbook_example():
    costs = [8.0, 7.0, 6.0, 5.0, 4.0]
    assert loads(karmarkar_karp(costs, 2, falling(costs)), costs) == [16.0, 14.0]


@given(COSTS, st.integers(1, 8))
def test_each_sample_once_and_same_loads_as_the_reference(costs: list[float], parts: int):
    result = karmarkar_karp(costs, parts, falling(costs))
    assert len(result) == parts
    assert sorted(i for part in result for i in part) == list(range(len(costs)))
    assert loads(result, costs) == reference_loads(costs, parts)


@given(COSTS, st.integers(1, 8))
def test_equal_sizes(costs: list[float], parts: int):
    result = karmarkar_karp(costs, parts, falling(costs), equal_sizes=True)
    sizes = [len(part) for part in result]
    assert sorted(i for part in result for i in part) == list(range(len(costs)))
    assert max(sizes) - min(sizes) <= 1
