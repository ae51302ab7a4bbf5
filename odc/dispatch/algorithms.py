"""The post-balancing algorithms of OrchMLLM: 1 and 4 for packed examples, 2 and 5 for padded ones.

Where the published listings are loose, this is what they do here:
* 1 and 4 balance the sum of what single examples cost, longest first onto the lightest instance. Where that leaves more
  than a thousandth to the lower bound, the engine of `odc.balance` trades between instances.
* 4 with a tolerance compares sums in whole steps of the tolerance, equal ones by squares, then by instance.
* 2 cuts runs of rising lengths for the least bound that is enough, which is exact: some best solution consists of such
  runs, also with the quadratic term.
* 5 takes rising lengths and stops after d batches; the rest goes longest first onto the lightest sum. The best runs
  under its cost are tried too, and the cheaper result wins.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from odc.balance.bound import falling_bound
from odc.balance.compiled import run_loop
from odc.balance.partition import falling, partition, to_ticks
from odc.dispatch import algorithm_loops as _loops
from odc.dispatch.rearrangement import Ints

_NEAR = 1 + 1e-3  # times the lower bound


def unpadded(costs: ArrayLike, instances: int) -> Ints:
    """Algorithms 1 and 4: destination instance, int64 [n], of every example with these costs >= 0.

    The greatest sum of costs is at most 4/3 - 1/(3d) of the least possible (Graham 1969).
    """
    ticks = to_ticks(np.asarray(costs), instances)
    n = len(ticks)
    if not n:
        return np.empty(0, np.int64)
    order = falling(ticks, None)
    sorted_ticks = ticks[order]
    found = onto(sorted_ticks, np.zeros(instances, np.int64))
    latest = np.bincount(found, weights=sorted_ticks).max()  # exact: sums of ticks are below 2^53
    if latest > falling_bound(sorted_ticks, instances, None) * _NEAR:
        return partition(costs, instances)
    owners = np.empty(n, np.int64)
    owners[order] = found
    return owners


def onto(costs: Ints, sums: Ints) -> Ints:
    """The instance of each cost, int64 [n]: in the order listed onto the least sum, starting from `sums` [d]."""
    scratch = np.empty(len(sums), np.int64), np.empty(len(costs), np.int64)
    _, given = run_loop(_loops.lightest, len(costs), costs, sums, len(sums).bit_length(), *scratch)
    return np.asarray(given[-1], np.int64)


def tolerant(lengths: Ints, instances: int, tolerance: int) -> Ints:
    """Algorithm 4 as published: longest first, onto the least sum in steps of `tolerance`, then least sum of squares.

    The greatest sum of lengths is below the mean plus the longest example plus the tolerance. Sums of squares are
    compared by their leading bits, where sum, squares and instance do not fit into 63 bits.
    """
    order = falling(lengths, None)
    n, longest = len(lengths), int(lengths.max(initial=1))
    most = int(lengths.sum()) // instances + longest + tolerance  # no sum is greater
    places = instances.bit_length()
    wanted, left = (most * longest).bit_length(), 63 - places - (most // tolerance).bit_length()
    bits = max(0, min(wanted, left))
    loads, squares, heap = np.zeros((3, instances), np.int64)
    scratch = wanted - bits, bits, places, heap, np.empty(n, np.int64)
    _, given = run_loop(_loops.within, n, lengths[order], tolerance, loads, squares, *scratch)
    owners = np.empty(n, np.int64)
    owners[order] = given[-1]
    return owners


def padded(costs: ArrayLike, instances: int) -> Ints:
    """Algorithm 2: destination instance of every example, int64 [n]; the least max over batches of size x costliest.

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
    ends = np.zeros(instances, np.int64)
    bound, _ = run_loop(_loops.least_bound, n, rising, instances, low, high, ends)
    number, given = run_loop(_loops.runs, n, rising, bound, instances, ends)
    return _owners(order, given[-1], number)


def padded_attention(lengths: Ints, instances: int, alpha: float, beta: float) -> Ints:
    """Algorithm 5: destination instance of every example where a batch costs alpha x sum + beta x size x longest^2.

    The cheaper of the published algorithm and the best runs of rising lengths. No factor to the optimum is known.
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
    alone = alpha * float(sums[n]) + beta * float((rising.astype(np.float64) ** 2).sum())
    low = max(alpha * longest + beta * longest * longest, alone / instances * (1 - 1e-9))
    ends = np.zeros(instances, np.int64)
    bound, _ = run_loop(_loops.least_mixed_bound, n, rising, sums, alpha, beta, instances, low, ends)
    number, given = run_loop(_loops.mixed_runs, n, rising, sums, alpha, beta, bound, instances, ends)
    return np.array([0, *given[-1][:number]], np.int64)


def _listing(rising: Ints, sums: Ints, instances: int, alpha: float, beta: float, worth: float) -> Ints | None:
    """The published algorithm 5, for lengths in rising order; None where it must cost `worth` or more.

    If it fills all batches before the end, each has (size + 1) x longest > bound >= the mean sum, and one of them gets
    the longest of all. Otherwise it consists of runs, and the best runs are known.
    """
    n, longest = len(rising), float(rising[-1])
    if alpha * longest + beta * longest * max(longest, float(sums[n]) / instances) >= worth:
        return None
    falls = np.ascontiguousarray(rising[::-1])
    bound = int(np.bincount(onto(falls, np.zeros(instances, np.int64)), weights=falls).max())  # of algorithm 1
    number, given = run_loop(_loops.runs, n, rising, bound, instances, np.zeros(instances, np.int64))
    number = min(number, instances)
    cuts = np.array([0, *given[-1][:number]], np.int64)
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
