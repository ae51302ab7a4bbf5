"""Cost models from measurements: what microbatches of known lengths took.

Chose least squares on *relative* errors with coefficients that cannot be negative: a planner compares short and long
microbatches alike, and a model that gives time back for tokens would pack nonsense. With three coefficients every set
of them that may be non-zero is tried, so the result is the optimum and nothing iterates. The price: no other shape than
these is ever found; `Fit.error` says how well it fits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

from odc.balance.cost import Cost, QuadraticCost
from odc.errors import PlanError


@dataclass(frozen=True)
class Fit:
    """`seconds of a microbatch = fixed + scale * sum of cost(length)` over its samples.

    Args:
        cost: of one sample. From `fit` it is in seconds and `scale` is 1.
        scale: seconds for each unit of `cost`.
        fixed: seconds of any microbatch, however short.
        error: root mean square of the relative errors on what was measured: 0.05 is 5%.
        worst: the largest relative error.
        count: microbatches it was fitted to.
    """

    cost: Cost
    scale: float
    fixed: float
    error: float
    worst: float
    count: int

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

    Args:
        microbatches: lengths of the samples of each.
        seconds: compute time of each, above 0.

    Raises:
        PlanError: fewer than three measurements, some not above 0, or no coefficient for the lengths at all (all time
            is fixed), which predicts nothing.
    """
    _check(microbatches, seconds)
    tokens = [float(sum(own)) for own in microbatches]
    squares = [float(sum(length * length for length in own)) for own in microbatches]
    fixed, a, b = _least_squares([[1.0] * len(seconds), tokens, squares], seconds)
    if a == 0 and b == 0:
        raise PlanError("measured seconds do not grow with the lengths: there is nothing to fit a cost model to")
    return _judged(QuadraticCost(a, b), 1.0, fixed, microbatches, seconds)


def fit_scale(cost: Cost, microbatches: Sequence[Sequence[int]], seconds: Sequence[float]) -> Fit:
    """The best `fixed + scale * cost` for a cost model that is given (FLOPs of a config, say). Raises as `fit`."""
    _check(microbatches, seconds)
    given = [float(sum(cost(length) for length in own)) for own in microbatches]
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
    errors = [abs(found.predict(own) / second - 1) for own, second in zip(microbatches, seconds, strict=True)]
    return Fit(cost, scale, fixed, math.sqrt(fmean(error * error for error in errors)), max(errors), len(seconds))


def _least_squares(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Coefficients >= 0 of the columns with the least sum of squared relative errors."""
    weighted = [[value / second for value, second in zip(column, seconds, strict=True)] for column in columns]
    sizes = [math.sqrt(math.fsum(value * value for value in column)) for column in weighted]
    unit = [[v / size for v in column] if size else column for column, size in zip(weighted, sizes, strict=True)]
    best, best_left = [0.0] * len(columns), math.inf
    for count in range(1, len(columns) + 1):
        for chosen in combinations([c for c, size in enumerate(sizes) if size], count):
            found = _solve([unit[c] for c in chosen])
            if found is None or min(found) < 0:
                continue
            rows = zip(*(unit[c] for c in chosen), strict=True)
            left = math.fsum((1 - sum(f * v for f, v in zip(found, row, strict=True))) ** 2 for row in rows)
            if left < best_left * (1 - 1e-9):  # one coefficient more has to be worth something
                best_left, best = left, [0.0] * len(columns)
                for c, value in zip(chosen, found, strict=True):
                    best[c] = value / sizes[c]
    return best


def _solve(columns: Sequence[Sequence[float]]) -> list[float] | None:
    """Least squares of `columns @ x = 1` by the normal equations; None where columns depend on each other."""
    n = len(columns)
    matrix = [
        [math.fsum(u * v for u, v in zip(one, other, strict=True)) for other in columns] + [math.fsum(one)]
        for one in columns
    ]
    for i in range(n):
        pivot = max(range(i, n), key=lambda row: abs(matrix[row][i]))
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        if abs(matrix[i][i]) < 1e-10:  # columns have length 1
            return None
        for row in range(n):
            if row != i:
                factor = matrix[row][i] / matrix[i][i]
                matrix[row] = [v - factor * w for v, w in zip(matrix[row], matrix[i], strict=True)]
    return [matrix[i][n] / matrix[i][i] for i in range(n)]
