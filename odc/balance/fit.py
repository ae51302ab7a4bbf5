"""Cost models fitted to the measured times of microbatches of known lengths.

The fit is least squares on relative errors with coefficients that cannot be negative. Every subset of the at most three
coefficients is tried, so the result is the optimum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

import numpy as np

from odc.balance.cost import Cost, QuadraticCost
from odc.errors import PlanError


@dataclass(frozen=True)
class Fit:
    """`seconds of a microbatch = fixed + scale * sum of cost(length)` over its samples."""

    cost: Cost  # of one sample. From `fit` it is in seconds and `scale` is 1.
    scale: float  # seconds for each unit of `cost`
    fixed: float  # seconds of any microbatch, however short
    error: float  # root mean square of the relative errors on what was measured: 0.05 is 5%
    worst: float  # the largest relative error
    count: int  # microbatches it was fitted to

    def predict(self, lengths: Sequence[int]) -> float:
        """Predicted seconds of a microbatch of samples of these lengths."""
        return self.fixed + self.scale * sum(self.cost(length) for length in lengths)

    def __str__(self) -> str:
        how = f"a={self.cost.a:.4g} s, b={self.cost.b:.4g} s" if isinstance(self.cost, QuadraticCost) else "given cost"
        return (
            f"{how}, scale {self.scale:.4g}, {self.fixed:.4g} s a microbatch; relative error {self.error:.1%} "
            f"(worst {self.worst:.1%}) over {self.count} microbatches"
        )


def fit(microbatches: Sequence[Sequence[int]], seconds: Sequence[float]) -> Fit:
    """The best `fixed + a * tokens + b * sum of squares` for measured microbatches.

    Raises PlanError for fewer than three, for a time that is not above 0, and for times that do not grow with lengths.
    """
    _check(microbatches, seconds)
    tokens = [float(sum(lengths)) for lengths in microbatches]
    squares = [float(sum(length * length for length in lengths)) for lengths in microbatches]
    fixed, a, b = _least_squares([[1.0] * len(seconds), tokens, squares], seconds)
    if a == 0 and b == 0:
        raise PlanError("measured seconds do not grow with the lengths: there is nothing to fit a cost model to")
    return _judged(QuadraticCost(a, b), 1.0, fixed, microbatches, seconds)


def fit_scale(cost: Cost, microbatches: Sequence[Sequence[int]], seconds: Sequence[float]) -> Fit:
    """The best `fixed + scale * cost` for a cost model that is given (FLOPs of a config, say). Raises as `fit`."""
    _check(microbatches, seconds)
    given = [float(sum(cost(length) for length in lengths)) for lengths in microbatches]
    fixed, scale = _least_squares([[1.0] * len(seconds), given], seconds)
    if scale == 0:
        raise PlanError("measured seconds do not grow with the given cost")
    return _judged(cost, scale, fixed, microbatches, seconds)


def _check(microbatches: Sequence[Sequence[int]], seconds: Sequence[float]) -> None:
    if len(microbatches) != len(seconds) or len(seconds) < 3:
        given = f"{len(microbatches)} microbatches, {len(seconds)} times"
        raise PlanError(f"a fit needs 3 microbatches or more, each with its seconds, not {given}")
    for i, second in enumerate(seconds):
        if not 0 < second < math.inf:
            raise PlanError(f"microbatch {i} took {second!r} s: seconds must be finite and above 0")


def _judged(
    cost: Cost, scale: float, fixed: float, microbatches: Sequence[Sequence[int]], seconds: Sequence[float]
) -> Fit:
    found = Fit(cost, scale, fixed, 0.0, 0.0, len(seconds))
    errors = [abs(found.predict(lengths) / second - 1) for lengths, second in zip(microbatches, seconds, strict=True)]
    return Fit(cost, scale, fixed, math.sqrt(fmean(error * error for error in errors)), max(errors), len(seconds))


def _least_squares(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Coefficients >= 0 of the columns with the least sum of squared relative errors."""
    weighted = np.array(columns, np.float64) / np.asarray(seconds, np.float64)
    sizes = np.sqrt((weighted * weighted).sum(axis=1))
    best, best_left = [0.0] * len(columns), math.inf
    for count in range(1, len(columns) + 1):
        for chosen in map(list, combinations(np.flatnonzero(sizes).tolist(), count)):
            unit = (weighted[chosen] / sizes[chosen, None]).T
            found, _, rank, _ = np.linalg.lstsq(unit, np.ones(len(unit)), rcond=1e-5)
            if rank < count or found.min() < 0:  # columns that depend on each other, or a negative coefficient
                continue
            left = float(((1 - unit @ found) ** 2).sum())
            if left < best_left * (1 - 1e-9):  # one coefficient more has to be worth something
                best_left, best = left, [0.0] * len(columns)
                for c, value in zip(chosen, found, strict=True):
                    best[c] = float(value / sizes[c])
    return best
