"""Karmarkar-Karp: partition numbers into k sets of nearly equal sum by largest differencing.

No policy of odc uses it; it is the baseline of `odc grpo --balance verl` and `odc bench --only planners`. Partial
partitions are sparse, so the work follows the number of samples and not samples * k.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

# A slot is (load, tree), tree a sample index or a pair of trees. A state holds its non-empty slots by falling load.
_Slot = tuple[float, Any]


def karmarkar_karp(
    costs: Sequence[float], parts: int, order: Sequence[int], *, equal_sizes: bool = False
) -> list[list[int]]:
    """Partition the samples listed in `order` (their falling `costs`) into `parts` lists, sums nearly equal.

    With `equal_sizes` every list gets the same number of samples (one more or less where it does not divide). Ties are
    merged in the order given. Returns lists of sample indices, costliest first; some are empty when samples are few.
    """
    width = parts if equal_sizes else 1
    groups = [order[i : i + width] for i in range(0, len(order), width)]
    heap: list[tuple[float, int, list[_Slot]]] = []
    for number, group in enumerate(groups):
        slots: list[_Slot] = [(costs[i], i) for i in group]
        heap.append((-_spread(slots, parts), number, slots))
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        _, _, wide = heapq.heappop(heap)
        _, _, narrow = heapq.heappop(heap)
        merged = _merge(wide, narrow, parts)
        heapq.heappush(heap, (-_spread(merged, parts), number, merged))
        number += 1
    filled = [_flatten(tree) for _, tree in heap[0][2]] if heap else []
    return filled + [[] for _ in range(parts - len(filled))]


def _spread(slots: list[_Slot], parts: int) -> float:
    return slots[0][0] - (slots[-1][0] if len(slots) == parts else 0.0)


def _merge(first: list[_Slot], second: list[_Slot], parts: int) -> list[_Slot]:
    """Give the largest slots of one the smallest (or empty) slots of the other."""
    overlap = len(first) + len(second) - parts
    if overlap <= 0:
        return sorted(first + second, key=itemgetter(0), reverse=True)
    alone = len(first) - overlap
    joined = [
        (a[0] + b[0], (a[1], b[1]))
        for a, b in zip(first[alone:], reversed(second[len(second) - overlap :]), strict=True)
    ]
    return sorted(first[:alone] + joined + second[: len(second) - overlap], key=itemgetter(0), reverse=True)


def _flatten(tree: Any) -> list[int]:
    indices: list[int] = []
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, tuple):
            pending.extend(node)
        else:
            indices.append(node)
    return indices
