"""The engine of all policies: `partition` spreads samples over parts, `refine` evens out given parts.

`partition` places the longest sample first on the part that ends first, then trades samples between late and early
parts, and searches exactly where samples are few. `refine` only trades.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from odc.balance import partition_loops as _loops
from odc.balance import search as _search
from odc.balance.bound import falling_bound, lower_bound
from odc.balance.compiled import loops_of
from odc.balance.state import Floats, Ints, Rules, new_assignment, new_tree
from odc.errors import PlanError

_BITS = 52  # of the largest cost times the number of samples: sums are exact in float64
_NEAR = 8e-5  # share of the bound that is not worth another trade
_LEAST = 2e-6  # share of its end that a late part must gain by a trade
_FEW = 24  # samples that are searched exactly ...
_STEPS = 1500  # ... in at most so many steps ...
_WORTH = 1e-3  # ... for an end that is earlier by this share


def partition(
    costs: ArrayLike,
    parts: int,
    *,
    equal_sizes: bool = False,
    speeds: Sequence[float] | None = None,
    needs: ArrayLike | None = None,
    limits: Sequence[int] | None = None,
    ties: ArrayLike | None = None,
) -> Ints:
    """Spread n samples over `parts` parts whose times are nearly equal.

    Args:
        costs: [n] finite numbers >= 0.
        parts: k >= 1; some may stay empty.
        equal_sizes: every part gets the same number of samples (or one more, where that does not divide).
        speeds: [k] numbers > 0; a part's time is its cost divided by its speed.
        needs, limits: [n] and [k] integers; with both, sample i lies on a part whose limit is at least `needs[i]`.
        ties: [n] a permutation of range(n) that orders samples of equal cost.

    Returns the part of each sample, int64 [n]: the same with numba and without, on every machine. Costs are rounded to
    2**-52 of n times the largest where they are not integers below that. Parts within 0.008% of the lower bound are
    left as they are. Raises PlanError for bad costs, and where no part may hold a sample.
    """
    ticks = to_ticks(np.asarray(costs), parts)
    order = falling(ticks, ties)
    n = len(order)
    slowness = np.ones(parts) if speeds is None else 1.0 / np.asarray(speeds, np.float64)
    need, limit = np.zeros(n, np.int64), np.zeros(parts, np.int64)
    if needs is not None and limits is not None:
        need, limit = np.asarray(needs, np.int64)[order], np.asarray(limits, np.int64)
        if n and need.max() > limit.max():
            raise PlanError(f"no part may hold sample {int(order[need.argmax()])}")
    by_kind = np.lexsort((slowness, -limit))
    problem = _Partitioning(ticks[order], need, slowness[by_kind], limit[by_kind], equal_sizes)
    if limits is None:
        least = falling_bound(problem.costs, parts, None if speeds is None else 1.0 / slowness)
    else:
        least = lower_bound(problem.costs, parts, speeds=speeds, needs=need, limits=limits)
    owners, latest = problem.trade(least * (1 + _NEAR))
    if n <= _FEW and latest > least * (1 + _WORTH):
        owners = problem.search(owners, latest, least)
    result = np.empty(n, np.int64)
    result[order] = by_kind[owners]
    return result


class _Partitioning(NamedTuple):
    """Samples by falling cost, and parts by kind."""

    costs: Ints
    needs: Ints
    slowness: Floats
    limits: Ints
    equal_sizes: bool

    def trade(self, goal: float) -> tuple[Ints, float]:
        """The part of each sample by longest-first and trades, and when the latest part ends."""
        n, parts = len(self.costs), len(self.slowness)
        loops, arrays = loops_of(_loops, n)
        state = new_assignment(self.costs, self.slowness, needs=self.needs, limits=self.limits, arrays=arrays)
        if not self.equal_sizes:
            loops.longest_first(state, parts.bit_length())
        elif len(state.kinds) == 2:
            loops.deal(state)
        else:
            owners = self._deal_by_need()
            loops.put(state, owners if arrays else owners.tolist())
        loops.solve(state, Rules(goal, counts=self.equal_sizes, worth=_LEAST))
        owners = np.empty(n, np.int64)
        out = owners if arrays else owners.tolist()
        loops.get(state, out)
        owners[:] = out
        return owners, float((np.asarray(state.loads) * self.slowness).max())

    def _deal_by_need(self) -> Ints:
        """Neediest first, each to the part that ends first of those that may hold it and are not full."""
        n, parts = len(self.costs), len(self.slowness)
        room = np.full(parts, n // parts) + (np.arange(parts) < n % parts)
        loads, owners = np.zeros(parts, np.int64), np.empty(n, np.int64)
        for i in np.lexsort((np.arange(n), -self.needs)):
            ends = np.where(
                (room > 0) & (self.limits >= self.needs[i]), (loads + self.costs[i]) * self.slowness, np.inf
            )
            owner = int(ends.argmin())
            if not math.isfinite(ends[owner]):
                raise PlanError("no way to give every part as many samples under these limits")
            owners[i] = owner
            loads[owner] += self.costs[i]
            room[owner] -= 1
        return owners

    def search(self, owners: Ints, latest: float, least: float) -> Ints:
        """`owners`, or a placement whose latest part ends at least `_WORTH` earlier."""
        search, arrays = loops_of(_search, len(owners))
        if self.equal_sizes:
            quotas = np.bincount(owners, minlength=len(self.slowness))
        else:
            quotas = np.full(len(self.slowness), len(owners))
        tree = new_tree(self.costs, self.needs, self.slowness, self.limits, quotas, arrays=arrays)
        out = owners.copy() if arrays else owners.tolist()
        search.search(tree, out, latest * (1 - _WORTH), least * (1 + _NEAR), _WORTH, False, _STEPS)
        return np.asarray(out, np.int64)


def to_ticks(costs: NDArray[np.generic], parts: int) -> Ints:
    """Costs as int64, scaled by one power of two where they are not integers whose sum has few enough bits."""
    n = len(costs)
    if not n:
        return np.empty(0, np.int64)
    if costs.dtype.kind not in "iuf":
        costs = costs.astype(np.float64)
    top, least = float(costs.max()), float(costs.min())
    if not (math.isfinite(top) and least >= 0):
        raise PlanError("costs must be finite numbers >= 0")
    bits = min(_BITS, 62 - parts.bit_length(), 62 - n.bit_length())
    exponent = math.frexp(top)[1] + n.bit_length()
    if exponent <= bits and (costs.dtype.kind in "iu" or bool((costs == np.floor(costs)).all())):
        return costs.astype(np.int64)
    return np.rint(np.ldexp(costs.astype(np.float64), bits - exponent)).astype(np.int64)


def falling(ticks: Ints, ties: ArrayLike | None) -> Ints:
    """Samples by falling cost, equals by rising `ties`: one sort of unique keys, which is the same everywhere."""
    n = len(ticks)
    if ties is not None:
        seats = np.empty(n, np.int64)
        seats[np.asarray(ties, np.int64)] = np.arange(n)
        return seats[falling(ticks[seats], None)]
    bits = n.bit_length()
    keys = (-ticks << bits) | np.arange(n)
    keys.sort()
    return keys & ((1 << bits) - 1)


_REACH = 3  # samples on either side of the ideal trade that are tried, because the nearest may not fit
_PARTNERS = 8


def refine(
    parts: list[list[int]],
    costs: Sequence[float],
    *,
    lengths: Sequence[int],
    max_tokens: int,
    worth: float = 0.0,
) -> list[list[int]]:
    """Even out lists of samples by trades between pairs of them; the costliest never gets costlier. Where no trade
    helps it, the next one is improved.

    Args:
        lengths, max_tokens: no trade lifts the sum of lengths of a part over `max_tokens`.
        worth: a trade must lower the larger of two costs by at least this share of it; larger values end sooner.
    """
    listed = [i for part in parts for i in part]
    samples = np.array(listed, np.int64)
    owners = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    ticks = to_ticks(np.array([costs[i] for i in listed], np.float64), len(parts))
    order = falling(ticks, None)
    samples, owners = samples[order], owners[order]
    sizes, rooms = np.array([lengths[i] for i in listed], np.int64)[order], np.full(len(parts), max_tokens)
    loops, arrays = loops_of(_loops, len(samples))
    state = new_assignment(ticks[order], np.ones(len(parts)), sizes=sizes, rooms=rooms, arrays=arrays)
    out: Any = owners if arrays else owners.tolist()
    loops.put(state, out)
    loops.solve(state, Rules(0.0, False, _REACH, worth, True, _PARTNERS))
    loops.get(state, out)
    result: list[list[int]] = [[] for _ in parts]
    for i, owner in zip(samples.tolist(), out, strict=True):
        result[owner].append(i)
    return result
