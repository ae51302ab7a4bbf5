"""Node-wise placement: how long HiGHS takes for the optimum, and how near exchanges come within their default budget.

Times are processor time of the planning thread, so that other work on the machine does not count: the least and the
most over seeds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import pytest

from odc.dispatch import BalancePolicy, Rearrangement, node_wise, post_balance
from odc.dispatch.node_wise import Method, NodeWise

EACH, SEEDS = 60, 4
CASES = [(4, 2), (8, 2), (8, 4), (16, 4), (16, 8), (24, 4), (24, 8), (32, 8)]


def timed(move: Rearrangement, lengths: np.ndarray, per_node: int, method: Method) -> tuple[float, NodeWise]:
    """Milliseconds of processor time of this thread, and the placement."""
    began = time.thread_time()
    placement = node_wise(move, lengths, per_node, method=method)
    return (time.thread_time() - began) * 1e3, placement


@pytest.mark.parametrize(("instances", "per_node"), CASES)
def test_exact_against_exchanges(note: Callable[..., None], instances: int, per_node: int) -> None:
    pytest.importorskip("scipy")
    times: dict[Method, list[float]] = {"exact": [], "exchange": []}
    gaps = []
    for seed in range(-1, SEEDS):  # the first one loads the libraries and is not counted
        draw = np.random.default_rng(max(seed, 0))
        lengths = np.clip(draw.lognormal(math.log(800), 0.8, instances * EACH), 16, 8192).astype(np.int64)
        move = post_balance(list(lengths.reshape(instances, EACH)), BalancePolicy())
        costs: dict[Method, int] = {}
        for method in times:
            took, placement = timed(move, lengths, per_node, method)
            costs[method] = placement.cost
            if seed >= 0:
                times[method].append(took)
        gaps.append(costs["exchange"] / costs["exact"] - 1)
    note(
        instances=instances,
        per_node=per_node,
        exact_ms=min(times["exact"]),
        exact_most_ms=max(times["exact"]),
        exchange_most_ms=max(times["exchange"]),
        gap=f"{max(gaps):.2%}",
    )
