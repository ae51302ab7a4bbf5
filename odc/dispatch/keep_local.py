"""Swap examples of equal length so that they stay where they are: not in the paper, on top of its algorithm 3.

Chose to go beyond permuting whole mini-batches: with examples drawn at random, every new mini-batch holds a little from
everywhere, and no permutation keeps much of it on its node (`bench/bench_dispatch.py`). But what a mini-batch costs
depends on its lengths alone, so two examples of one length may trade places for nothing, and of nearly one length for
nearly nothing. The price is that the tolerance, where it is not 0, gives up as large a share of the balance at most.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from odc.balance.compiled import loops_of
from odc.dispatch import node_loops as _loops
from odc.dispatch.rearrangement import Ints
from odc.errors import PlanError


def keep_local(
    owners: Ints, homes: Ints, lengths: Ints, instances: int, per_node: int, *, tolerance: float = 0.0
) -> Ints:
    """Destination instances, int64 [n], with the same lengths on every instance and fewer examples away from home.

    Args:
        owners: int64 [n] destination instance of each example.
        homes: int64 [n] instance on which it lies.
        lengths: int64 [n] >= 1.
        instances: d.
        per_node: instances of a node.
        tolerance: examples trade places if their lengths lie in one step of a ladder whose steps are this share wide;
            0 only equal ones. A mini-batch's longest and sum of lengths grow by less than this share.

    Of each length as many stay on their instance as can, then as many on their node.
    """
    if not 0 <= tolerance < 1:
        raise PlanError(f"a tolerance is a share from 0 to below 1, not {tolerance!r}")
    n = len(lengths)
    if not n:
        return owners
    step = lengths if tolerance == 0 else _ladder(lengths, tolerance)
    order = np.argsort(step, kind="stable")
    cuts = np.concatenate([[0], np.flatnonzero(np.diff(step[order])) + 1, [n]])
    given: list[Any] = [order, cuts, homes, owners, np.full(instances, -1), np.empty(n, np.int64)]
    given += [np.zeros(n, np.int64), np.full(n, -1)]
    loops, arrays = loops_of(_loops, n)
    values = given if arrays else [array.tolist() for array in given]
    loops.stay(*values[:4], per_node, *values[4:])
    return np.asarray(values[7], np.int64)


def _ladder(lengths: Ints, tolerance: float) -> Ints:
    """The step of a ladder that each length lies on; steps begin at whole numbers."""
    begins, top = [1], int(lengths.max())
    while begins[-1] <= top:
        begins.append(max(begins[-1] + 1, int(begins[-1] * (1 + tolerance))))
    return np.searchsorted(np.array(begins), lengths, side="right")
