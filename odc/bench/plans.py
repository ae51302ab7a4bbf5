"""Cases of planning: `partition` against plain longest-first and Karmarkar-Karp, and whole policies.

Lengths are LongAlign-like, costs verl's 24576 l + l^2. LPT is the engine's own heap of loads, compiled, without trades;
it starts from the same unsorted costs. KK is `odc.balance.karmarkar_karp`, sparse and interpreted.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from odc.balance import lb_micro, lb_mini, partition, partition_loops, quadratic
from odc.balance.compiled import loops_of
from odc.balance.karmarkar_karp import karmarkar_karp
from odc.balance.partition import falling, to_ticks
from odc.balance.state import Ints, new_assignment
from odc.bench.rounds import Action

COST = quadratic(24576, 1)
CAP = 65536
SAMPLES_A_RANK = 8


def draw_lengths(samples: int, seed: int = 0) -> Ints:
    """int64 [samples]: lognormal with a mean near 16.5K tokens, clipped at 64K."""
    values = np.random.default_rng(seed).lognormal(math.log(12500), 0.8, samples)
    return np.clip(values, 16, CAP).astype(np.int64)


def plain_lpt(costs: Ints, parts: int) -> Ints:
    """int64 [samples]: owners by longest first without trades."""
    ticks = to_ticks(costs, parts)
    order = falling(ticks, None)
    state = new_assignment(ticks[order], np.ones(parts), arrays=True)
    compiled: Any = loops_of(partition_loops, len(costs))[0]
    compiled.longest_first(state, parts.bit_length())
    owners, result = np.empty(len(costs), np.int64), np.empty(len(costs), np.int64)
    compiled.get(state, owners)
    result[order] = owners
    return result


def sparse_kk(costs: Ints, parts: int, equal_sizes: bool = False) -> Ints:
    """int64 [samples]: owners by Karmarkar-Karp."""
    order = np.argsort(-costs, kind="stable").tolist()
    return owners_of(karmarkar_karp(costs.tolist(), parts, order, equal_sizes=equal_sizes), len(costs))


def owners_of(parts: list[list[int]], samples: int) -> Ints:
    """int64 [samples]: which part each sample is in."""
    owners = np.empty(samples, np.int64)
    for number, part in enumerate(parts):
        owners[part] = number
    return owners


def planners(samples: int, device: str) -> list[Action]:
    """`partition` of `samples` over an eighth as many parts, against its rivals; two policies beside."""
    parts = samples // SAMPLES_A_RANK
    lengths = draw_lengths(samples)
    costs, listed = 24576 * lengths + lengths**2, lengths.tolist()
    partition(np.arange(1000), 4)  # numba is loaded
    return [
        Action("partition", lambda: partition(costs, parts), against=("LPT", "KK")),
        Action("LPT", lambda: plain_lpt(costs, parts)),
        Action("KK", lambda: sparse_kk(costs, parts)),
        Action("lb_micro", lambda: lb_micro(listed, parts, CAP, COST), against=("KK",)),
        Action("lb_mini", lambda: lb_mini(listed, parts, CAP, COST), against=("KK",)),
    ]
