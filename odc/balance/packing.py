"""Packing samples into microbatches under a hard token cap, which is never exceeded."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from itertools import accumulate
from typing import TypeVar

import numpy as np

from odc.balance import search as _search
from odc.balance.compiled import loops_of, run_loop
from odc.balance.state import new_tree

T = TypeVar("T")
STEPS = 4000  # of the search, in all, for one call


def pack(lengths: Sequence[int], order: Sequence[int], max_tokens: int, steps: int = STEPS) -> list[list[int]]:
    """Pack the samples of `order` into few microbatches: best-fit decreasing, then a bounded search for one fewer.

    Every length must be at most `max_tokens`. Ties keep `order`. Returns lists of sample indices, none empty.
    """
    bins = best_fit_decreasing(lengths, order, max_tokens)
    falling = sorted(order, key=lambda i: -lengths[i])
    sizes = [lengths[i] for i in falling]
    while len(bins) > 1 and len(bins) > fewest_possible(sizes, max_tokens):
        fewer = _pack_into(sizes, len(bins) - 1, max_tokens, steps)
        if fewer is None:
            break
        bins = [[] for _ in range(len(bins) - 1)]
        for i, chosen in zip(falling, fewer, strict=True):
            bins[chosen].append(i)
    return bins


def small_at_both_ends(falling: list[T]) -> list[T]:
    """Microbatches that come by falling size in the order in which verl runs them, for pipelines."""
    return falling[::2][::-1] + falling[1::2]


def best_fit_decreasing(lengths: Sequence[int], order: Sequence[int], max_tokens: int) -> list[list[int]]:
    """As `pack`, but only longest first, each where it leaves the least room."""
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


def fewest_possible(sizes: Sequence[int], max_tokens: int) -> int:
    """Lower bound on the microbatches that samples of these falling `sizes` need (Martello and Toth 1990, L2).

    For every threshold up to half the cap: samples longer than cap - threshold share with none of at least the
    threshold, samples longer than half the cap take one microbatch each, and the rest must fit beside the latter.
    """
    rising = sizes[::-1]
    sums = [0, *accumulate(rising)]
    over_half = bisect_right(rising, max_tokens // 2)
    best = -(-sums[-1] // max_tokens)
    for threshold in {0, *rising[:over_half]}:
        alone = bisect_right(rising, max_tokens - threshold)
        first = bisect_left(rising, threshold)
        beside = (alone - over_half) * max_tokens - (sums[alone] - sums[over_half])
        rest = sums[over_half] - sums[first]
        best = max(best, len(rising) - over_half + max(0, -(-(rest - beside) // max_tokens)))
    return best


def _pack_into(sizes: list[int], count: int, max_tokens: int, steps: int) -> list[int] | None:
    """The microbatch of each of the falling `sizes`, `count` in all, or None when none was found in `steps`."""
    search, arrays = loops_of(_search, len(sizes))
    nothing, n = np.zeros(count, np.int64), len(sizes)
    tree = new_tree(
        np.array(sizes, np.int64), np.zeros(n, np.int64), np.ones(count), nothing, nothing + n, arrays=arrays
    )
    owners = np.empty(n, np.int64) if arrays else [0] * n
    ceiling = max_tokens + 0.5
    if search.search(tree, owners, ceiling, float(max_tokens), 0.0, True, steps) == ceiling:
        return None
    return [int(owner) for owner in owners]


def pack_evenly(
    lengths: Sequence[int], costs: Sequence[float], order: Sequence[int], count: int, max_tokens: int
) -> list[list[int]] | None:
    """Spread the samples of `order` (falling cost) over `count` microbatches of nearly equal cost under the cap.

    Each sample goes to the cheapest microbatch that has room; where that fails, `pack` decides. Lists may be empty;
    None where neither finds a way.
    """
    fitted, given = run_loop(
        _search.least_load_first,
        len(order),
        np.array([costs[i] for i in order], np.float64),
        np.array([lengths[i] for i in order], np.int64),
        max_tokens,
        np.zeros(count),
        np.zeros(count, np.int64),
        np.zeros(len(order), np.int64),
    )
    if not fitted:
        bins = pack(lengths, order, max_tokens)
        return bins + [[] for _ in range(count - len(bins))] if len(bins) <= count else None
    bins = [[] for _ in range(count)]
    for i, chosen in zip(order, given[-1], strict=True):
        bins[chosen].append(i)
    return bins
