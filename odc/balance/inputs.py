"""What every policy checks before it plans, in one place, so that all refuse the same input with the same words."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from odc.balance.cost import Cost
from odc.errors import PlanError


def sample_costs(lengths: Sequence[int], ranks: int, max_tokens: int, cost: Cost) -> list[float]:
    """The cost of every sample, after checking the input of a policy.

    Raises PlanError for no samples, ranks < 1, a length below 1, a sample over the cap (named by its index, with its
    length and the cap), and a cost that is negative, infinite or not a number.
    """
    if ranks < 1:
        raise PlanError(f"a plan needs at least one rank, got ranks={ranks!r}")
    if not len(lengths):
        raise PlanError("there are no samples to plan: lengths is empty")
    by_length: dict[int, float] = {}
    for index, length in enumerate(lengths):
        if length < 1:
            raise PlanError(f"sample {index} has length {length!r}; every sample needs at least one token")
        if length > max_tokens:
            raise PlanError(f"sample {index} has {length} tokens, more than the cap of {max_tokens} per microbatch")
        if length not in by_length:
            value = float(cost(length))
            if not (math.isfinite(value) and value >= 0):
                raise PlanError(f"the cost of sample {index} ({length} tokens) is {value!r}, not a finite number >= 0")
            by_length[length] = value
    return [by_length[length] for length in lengths]


def costliest_first(costs: Sequence[float], seed: int) -> list[int]:
    """Sample indices by falling cost; `seed` only decides the order of samples of equal cost.

    `random()` of a seeded `random.Random` is promised to stay the same over Python versions and machines.
    """
    draw = random.Random(seed).random
    ties = [draw() for _ in costs]
    return sorted(range(len(costs)), key=lambda i: (-costs[i], ties[i]))
