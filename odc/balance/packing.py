"""Packing samples into microbatches under a hard token cap.

Chose best-fit decreasing where the number of microbatches counts, and least-load-first where their evenness does. Both
place each sample once and never move it; the price is at most one or two microbatches more than the optimum on hard
instances. The cap is never exceeded, not by one token.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence


def best_fit_decreasing(lengths: Sequence[int], order: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Pack the samples of `order` into few microbatches: longest first, each where it leaves the least room.

    Every length must be at most `max_tokens`. Ties keep `order`. Returns lists of sample indices, none empty.
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, bin), ascending
    for i in sorted(order, key=lambda i: -lengths[i]):
        at = bisect_left(room, (lengths[i], -1))
        if at == len(room):
            room_left, chosen = max_tokens, len(bins)
            bins.append([])
        else:
            room_left, chosen = room.pop(at)
        bins[chosen].append(i)
        insort(room, (room_left - lengths[i], chosen))
    return bins


def pack_evenly(
    lengths: Sequence[int], costs: Sequence[float], order: Sequence[int], count: int, max_tokens: int
) -> list[list[int]] | None:
    """Spread the samples of `order` (falling cost) over `count` microbatches of nearly equal cost under the cap.

    Each sample goes to the cheapest microbatch that has room. Where that fails, best-fit decreasing decides.
    Returns `count` lists, some perhaps empty, or None when neither finds a way.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    heap = [(0.0, b) for b in range(count)]
    for i in order:
        passed = []
        while heap and tokens[heap[0][1]] + lengths[i] > max_tokens:
            passed.append(heapq.heappop(heap))
        if not heap:
            return _pack_tightly(lengths, order, count, max_tokens)
        load, chosen = heap[0]
        bins[chosen].append(i)
        tokens[chosen] += lengths[i]
        heapq.heapreplace(heap, (load + costs[i], chosen))
        for entry in passed:
            heapq.heappush(heap, entry)
    return bins


def _pack_tightly(lengths: Sequence[int], order: Sequence[int], count: int, max_tokens: int) -> list[list[int]] | None:
    bins = best_fit_decreasing(lengths, order, max_tokens)
    return bins + [[] for _ in range(count - len(bins))] if len(bins) <= count else None
