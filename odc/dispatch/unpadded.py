"""Post-balancing of packed examples: the paper's algorithms 1 and 4.

Chose to balance the sum of whatever one example costs, for both: without padding the cost of algorithm 4,
l + lambda l^2, adds up over examples too, so that the 4/3 bound of algorithm 1 (longest first onto the lightest) holds
for it. Where that alone leaves more than a thousandth to the lower bound, the engine of `odc.balance` trades between
instances. The price is that the paper's tolerance needs a loop of its own.

Where the listing of algorithm 4 is loose: two sums within v of each other are compared by squares, others by sums,
which is no order (a ~ b and b ~ c do not give a ~ c), so what a heap makes of it depends on the heap. `tolerant`
compares sums in whole steps of v, equal ones by squares, then by instance, which is an order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from odc.balance.bound import falling_bound
from odc.balance.compiled import loops_of
from odc.balance.partition import falling, partition, to_ticks
from odc.dispatch import loops as _loops
from odc.dispatch.rearrangement import Ints

_NEAR = 1 + 1e-3  # times the lower bound


def unpadded(costs: ArrayLike, instances: int) -> Ints:
    """Destination instance of every example, int64 [n], such that the greatest sum of costs is small.

    Args:
        costs: [n] finite numbers >= 0.
        instances: d >= 1.

    The greatest sum is at most 4/3 - 1/(3d) of the least possible (Graham 1969); equal inputs give equal results on
    every machine.
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
    """The instance of each cost, int64 [n], in the order listed onto the least sum, where `sums` [d] lie already."""
    places, found = len(sums).bit_length(), np.empty(len(costs), np.int64)
    loops, arrays = loops_of(_loops, len(costs))
    given: list[Any] = [costs, sums, np.empty(len(sums), np.int64), found]
    values = given if arrays else [array.tolist() for array in given]
    loops.lightest(values[0], values[1], places, *values[2:])
    found[:] = values[3]
    return found


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
    loops, arrays = loops_of(_loops, n)
    given: list[Any] = [lengths[order], *np.zeros((3, instances), np.int64), np.empty(n, np.int64)]
    values = given if arrays else [array.tolist() for array in given]
    loops.within(values[0], tolerance, *values[1:3], wanted - bits, bits, places, *values[3:])
    owners = np.empty(n, np.int64)
    owners[order] = values[4]
    return owners
