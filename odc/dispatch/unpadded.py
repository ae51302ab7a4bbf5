"""Post-balancing of packed examples: the paper's algorithms 1 and 4.

Chose to give the sum of whatever one example costs to the engine of `odc.balance` (longest first onto the lightest, as
algorithm 1, then trades between instances) for both: without padding the cost of algorithm 4, l + lambda l^2, adds up
over examples too, so the same 4/3 bound holds for it. The price is that the paper's tolerance needs a loop of its own.

Where the listing of algorithm 4 is loose: two sums within v of each other are compared by squares, others by sums,
which is no order (a ~ b and b ~ c do not give a ~ c), so what a heap makes of it depends on the heap. `tolerant`
compares sums in whole steps of v, equal ones by squares, then by instance, which is an order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from odc.balance.compiled import loops_of
from odc.balance.partition import falling, partition
from odc.dispatch import loops as _loops
from odc.dispatch.rearrangement import Ints


def unpadded(costs: ArrayLike, instances: int) -> Ints:
    """Destination instance of every example, int64 [n], such that the greatest sum of costs is small.

    Args:
        costs: [n] finite numbers >= 0.
        instances: d >= 1.

    The greatest sum is at most 4/3 - 1/(3d) of the least possible (Graham 1969); equal inputs give equal results on
    every machine.
    """
    return partition(costs, instances)


def tolerant(lengths: Ints, instances: int, tolerance: int) -> Ints:
    """Algorithm 4 as published: longest first, onto the least sum in steps of `tolerance`, then least sum of squares.

    The greatest sum of lengths is below the mean plus the longest example plus the tolerance.
    """
    order = falling(lengths, None)
    loops, arrays = loops_of(_loops, len(order))
    sums, squares, heap = np.zeros((3, instances), np.int64)
    found = np.empty(len(order), np.int64)
    if arrays:
        loops.within(lengths[order], tolerance, sums, squares, heap, found)
    else:
        out = found.tolist()
        loops.within(lengths[order].tolist(), tolerance, sums.tolist(), squares.tolist(), heap.tolist(), out)
        found[:] = out
    owners = np.empty(len(order), np.int64)
    owners[order] = found
    return owners
