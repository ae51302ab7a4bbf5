"""Lower bounds on the time of the latest rank, as parallel-machine scheduling knows them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from odc.balance.state import Floats


def lower_bound(
    costs: ArrayLike,
    ranks: int,
    *,
    speeds: Sequence[float] | None = None,
    needs: ArrayLike | None = None,
    limits: Sequence[int] | None = None,
) -> float:
    """A time before which the latest of `ranks` ranks cannot end, however samples of these `costs` are spread.

    Costs are >= 0, in time of a rank of speed 1. With `needs` and `limits`, sample i may only lie on ranks whose limit
    is at least `needs[i]`.

    For ranks of equal speed it is the greatest of the mean, the costliest sample, and for every j the sum of the j + 1
    cheapest among the j * ranks + 1 costliest samples, since some rank must hold that many of them. For unequal speeds
    it spreads, divided at will, the j costliest samples over the j fastest ranks for every j < ranks, and all samples
    over all ranks (Horvath, Lam and Sethi 1977). For unequal limits it adds, per limit, the bound of the samples that
    need more on the ranks that have more. It never rises when a rank is added.
    """
    cost = np.asarray(costs, np.float64)
    speed = None if speeds is None else np.asarray(speeds, np.float64)
    best = falling_bound(np.sort(cost)[::-1], ranks, speed)
    if needs is not None and limits is not None:
        need, limit = np.asarray(needs), np.asarray(limits)
        for level in np.unique(limit)[:-1]:
            more = limit > level
            fewer = None if speed is None else speed[more]
            best = max(best, falling_bound(np.sort(cost[need > level])[::-1], int(more.sum()), fewer))
    return best


def falling_bound(costs: NDArray[np.number], ranks: int, speeds: Floats | None) -> float:
    """`lower_bound` of costs that fall, without limits."""
    n = len(costs)
    if not n:
        return 0.0
    sums = np.empty(n + 1)
    sums[0] = 0.0
    np.cumsum(costs, out=sums[1:])
    if speeds is None or (speeds == speeds[0]).all():
        counts = np.arange((n - 1) // ranks + 1)
        last = counts * ranks
        longest = max(sums[n] / ranks, (sums[last + 1] - sums[last - counts]).max())
        return float(longest if speeds is None else longest / speeds[0])
    fastest = np.cumsum(np.sort(speeds)[::-1])
    few = min(ranks - 1, n)
    return float(max(sums[n] / fastest[-1], (sums[1 : few + 1] / fastest[:few]).max()))
