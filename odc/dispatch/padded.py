"""Post-balancing where padding counts: the paper's algorithms 2 (all of a batch padded) and 5 (attention alone).

Chose runs of the lengths in rising order under the least bound on a batch's cost. Where a batch costs its size times
something that rises with its longest example, some best solution consists of such runs (swap two examples that stand
the wrong way round: no batch grows) and the longest first run under a bound leaves the fewest after it. So algorithm 2
is exact here, not an approximation, also with the quadratic term: L^2 / b = b max^2. Algorithm 5 has no such proof.

Where the listings are loose, and what is done:
* 2 takes `sorted[0]` of rising lengths for both ends of its search, and returns the last walk, which may have been for
  a bound that is too small. Here the search runs from max(longest, mean) to longest x ceil(n / d), and the runs are cut
  for the bound that it found. The mean may be too high a start for none: a batch costs at least the sum of its own.
* 5 sorts falling, but `(len + 1) * s` is a padded size only if s is the longest, so the walk rises; `len > d` would
  open d + 1 batches, so it stops at d; what is left over goes longest first onto the lightest sum. The listing never
  looks at the cost it is for (short examples fill all d batches and the longest lie on top), so the best runs under
  that cost are tried too, and the cheaper of both is returned.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from odc.balance.compiled import loops_of
from odc.balance.partition import falling, to_ticks
from odc.dispatch import loops as _loops
from odc.dispatch.rearrangement import Ints
from odc.dispatch.unpadded import onto


def padded(costs: ArrayLike, instances: int) -> Ints:
    """Destination instance of every example, int64 [n], with the least possible max over batches of size x costliest.

    Args:
        costs: [n] finite numbers >= 0, what one example costs if none in its batch costs more: its length, or
            alpha l + beta l^2.
        instances: d >= 1.

    Exact for integers whose sum is below 2^52; others are rounded to 2^-52 of n times the largest.
    """
    ticks = to_ticks(np.asarray(costs), instances)
    n = len(ticks)
    if not n:
        return np.empty(0, np.int64)
    order = np.ascontiguousarray(falling(ticks, None)[::-1])
    rising = ticks[order]
    longest = int(rising[-1])
    low, high = max(longest, -(-int(rising.sum()) // instances)), longest * -(-n // instances)
    loops, arrays = loops_of(_loops, n)
    ends = np.zeros(instances, np.int64)
    values, cuts = (rising, ends) if arrays else (rising.tolist(), ends.tolist())
    bound = loops.least_bound(values, instances, low, high, cuts)
    return _owners(order, cuts, loops.runs(values, bound, instances, cuts))


def padded_attention(lengths: Ints, instances: int, alpha: float, beta: float) -> Ints:
    """Destination instance of every example where a batch costs alpha x sum + beta x size x longest^2 (algorithm 5).

    The cheaper of the published listing and the best runs of rising lengths. No factor to the optimum is known.
    """
    n = len(lengths)
    if not n:
        return np.empty(0, np.int64)
    order = np.ascontiguousarray(falling(lengths, None)[::-1])
    rising = lengths[order]
    sums = np.zeros(n + 1, np.int64)
    np.cumsum(rising, out=sums[1:])
    cuts = _best_runs(rising, sums, instances, alpha, beta)
    sizes, longest = np.diff(cuts), rising[cuts[1:] - 1].astype(np.float64)
    cost = float((alpha * np.diff(sums[cuts]) + beta * (sizes * longest**2)).max())
    listed = _listing(rising, sums, instances, alpha, beta, cost)
    if listed is not None and _latest(rising, listed, instances, alpha, beta) < cost:
        owners = np.empty(n, np.int64)
        owners[order] = listed
        return owners
    return _owners(order, cuts[1:], len(sizes))


def _best_runs(rising: Ints, sums: Ints, instances: int, alpha: float, beta: float) -> Ints:
    """Where the runs of the least bound begin, and n; `sums[i]` is the sum of the first i lengths."""
    n, longest = len(rising), float(rising[-1])
    loops, arrays = loops_of(_loops, n)
    alone = alpha * float(sums[n]) + beta * float((rising.astype(np.float64) ** 2).sum())
    low = max(alpha * longest + beta * longest * longest, alone / instances * (1 - 1e-9))
    ends = np.zeros(instances, np.int64)
    values, totals, cuts = (rising, sums, ends) if arrays else (rising.tolist(), sums.tolist(), ends.tolist())
    bound = loops.least_mixed_bound(values, totals, alpha, beta, instances, low, cuts)
    number = loops.mixed_runs(values, totals, alpha, beta, bound, instances, cuts)
    return np.array([0, *cuts[:number]], np.int64)


def _listing(rising: Ints, sums: Ints, instances: int, alpha: float, beta: float, worth: float) -> Ints | None:
    """The published algorithm 5, for lengths in rising order; None where it is seen to cost `worth` or more.

    If it fills all batches before the end, each has (size + 1) x longest > bound >= the mean sum, and one of them gets
    the longest of all. If not, it is made of runs, of which the best are known.
    """
    n, longest = len(rising), float(rising[-1])
    if alpha * longest + beta * longest * max(longest, float(sums[n]) / instances) >= worth:
        return None
    falls = np.ascontiguousarray(rising[::-1])
    bound = int(np.bincount(onto(falls, np.zeros(instances, np.int64)), weights=falls).max())  # of algorithm 1
    loops, arrays = loops_of(_loops, n)
    ends = np.zeros(instances, np.int64)
    filled, values = (ends, rising) if arrays else (ends.tolist(), rising.tolist())
    number = min(loops.runs(values, bound, instances, filled), instances)
    cuts = np.array([0, *filled[:number]], np.int64)
    done = int(cuts[-1])
    owners = np.empty(n, np.int64)
    owners[:done] = _owners(np.arange(done), cuts[1:], number)
    if done == n:
        return owners
    loads = np.zeros(instances, np.int64)
    loads[:number] = np.diff(sums[cuts])
    first = int(loads.argmin())  # gets the longest of all, next to what it has
    together = int(cuts[first + 1] - cuts[first]) + 1
    if alpha * float(loads[first] + falls[0]) + beta * together * float(falls[0]) ** 2 >= worth:
        return None
    owners[done:] = onto(falls[: n - done], loads)[::-1]
    return owners


def _latest(lengths: Ints, owners: Ints, instances: int, alpha: float, beta: float) -> float:
    sums = np.bincount(owners, weights=lengths, minlength=instances)
    sizes, longest = np.bincount(owners, minlength=instances), np.zeros(instances, np.int64)
    np.maximum.at(longest, owners, lengths)
    return float((alpha * sums + beta * (sizes * longest.astype(np.float64) ** 2)).max())


def _owners(order: Ints, ends: Any, number: int) -> Ints:
    """Run r of `order` lies on instance r."""
    cuts = np.array([0, *ends[:number]], np.int64)
    owners = np.empty(len(order), np.int64)
    owners[order] = np.repeat(np.arange(number), cuts[1:] - cuts[:-1])
    return owners
