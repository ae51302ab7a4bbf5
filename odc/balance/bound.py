"""Lower bound on the time of the latest rank.

Chose the classic bounds of parallel-machine scheduling over a linear program: they cost one sort and already meet the
optimum whenever there are many samples or one giant. What is left, a plan reports as its gap.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from odc.balance.state import Floats


def lower_bound(
    costs: ArrayLike,
    ranks: int,
    *,
    speeds: Sequence[float] | None = None,
    needs: ArrayLike | None = None,
    limits: Sequence[int] | None = None,
) -> float:
    """A time before which the latest of `ranks` ranks cannot end, however samples of these `costs` (>= 0) are spread.

    Args:
        costs: of every sample, in time of a rank of speed 1.
        ranks: number of ranks, >= 1.
        speeds: of every rank; all 1 unless given.
        needs, limits: with both, sample i may only lie on ranks whose limit is at least `needs[i]`.

    Ranks alike: the greatest of the mean, the costliest sample, and for every j the sum of the j + 1 cheapest among the
    j * ranks + 1 costliest samples (some rank must hold that many of them). Ranks of unequal speed: for every j < ranks
    the j costliest samples on the j fastest ranks, and all on all, both divided at will (Horvath, Lam and Sethi 1977).
    Of unequal limits: the greatest bound of the samples that need more than a limit, on the ranks that have more.
    Never rises when a rank is added.
    """
    cost = np.asarray(costs, np.float64)
    speed = np.ones(ranks) if speeds is None else np.asarray(speeds, np.float64)
    best = _falling_bound(np.sort(cost)[::-1], speed)
    if needs is not None and limits is not None:
        need, limit = np.asarray(needs), np.asarray(limits)
        for level in np.unique(limit)[:-1]:
            best = max(best, _falling_bound(np.sort(cost[need > level])[::-1], speed[limit > level]))
    return best


def _falling_bound(costs: Floats, speeds: Floats) -> float:
    if not len(costs):
        return 0.0
    sums = np.concatenate(([0.0], np.cumsum(costs)))
    ranks = len(speeds)
    if (speeds == speeds[0]).all():
        last = np.arange(0, len(costs), ranks)
        longest = max(sums[-1] / ranks, float((sums[last + 1] - sums[last - np.arange(len(last))]).max()))
        return float(longest / speeds[0])
    fastest = np.cumsum(np.sort(speeds)[::-1])
    few = min(ranks - 1, len(costs))
    return float(max(sums[-1] / fastest[-1], (sums[1 : few + 1] / fastest[:few]).max()))
