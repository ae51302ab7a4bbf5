"""Lower bound on the longest rank's cost.

Chose the best of the three classic bounds of parallel-machine scheduling over a linear program: they cost one sort and
already meet the optimum whenever there are many samples or one giant. What is left, a plan reports as its gap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def lower_bound(costs: Sequence[float], ranks: int) -> float:
    """A cost that the longest of `ranks` ranks has at least, however samples of these `costs` (>= 0) are spread.

    The greatest of the mean over ranks, the costliest sample, and for every j the sum of the j + 1 cheapest among the
    j * ranks + 1 costliest samples (some rank must hold that many of them). Never rises when a rank is added.
    """
    if not costs:
        return 0.0
    descending = sorted(costs, reverse=True)
    bound = max(math.fsum(costs) / ranks, descending[0])
    for j in range(1, (len(costs) - 1) // ranks + 1):
        last = j * ranks
        bound = max(bound, math.fsum(descending[last - j : last + 1]))
    return bound
