"""Exact answers by HiGHS, a solver of mixed-integer linear programs that scipy ships."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array


def shortest_longest(costs: Sequence[float], ranks: int, speeds: Sequence[float] | None = None) -> float:
    """The least time at which the latest rank can end; x[i * ranks + r] says that rank r has sample i."""
    n, k = len(costs), ranks
    falling = sorted(costs, reverse=True)
    speed = [1.0] * k if speeds is None else list(speeds)
    rows = lil_array((n + k, n * k + 1))
    for i in range(n):
        rows[i, i * k : (i + 1) * k] = 1
    for r in range(k):
        for i in range(n):
            rows[n + r, i * k + r] = falling[i]
        rows[n + r, n * k] = -speed[r]
    upper = np.ones(n * k + 1)
    if speeds is None:  # ranks alike: sample i on one of the first i + 1
        for i in range(min(n, k)):
            upper[i * k + i + 1 : (i + 1) * k] = 0
    upper[n * k] = np.inf
    lower, least = np.zeros(n * k + 1), np.zeros(n * k + 1)
    least[n * k] = 1
    lower[n * k] = sum(costs) / sum(speed)
    limits = LinearConstraint(rows.tocsr(), np.r_[np.ones(n), np.full(k, -np.inf)], np.r_[np.ones(n), np.zeros(k)])
    return _solved(least, np.r_[np.ones(n * k), 0], Bounds(lower, upper), limits)


def fewest_bins(sizes: Sequence[int], cap: int, most: int) -> int:
    """The least number of bins of `cap` that hold `sizes`, known to be at most `most`; y[b] says that bin b is used."""
    n, k = len(sizes), most
    falling = sorted(sizes, reverse=True)
    rows = lil_array((n + k, n * k + k))
    for i in range(n):
        rows[i, i * k : (i + 1) * k] = 1
    for b in range(k):
        for i in range(n):
            rows[n + b, i * k + b] = falling[i]
        rows[n + b, n * k + b] = -cap
    upper = np.ones(n * k + k)
    for i in range(min(n, k)):
        upper[i * k + i + 1 : (i + 1) * k] = 0
    limits = LinearConstraint(rows.tocsr(), np.r_[np.ones(n), np.full(k, -np.inf)], np.r_[np.ones(n), np.zeros(k)])
    used = np.r_[np.zeros(n * k), np.ones(k)]
    return round(_solved(used, np.ones(n * k + k), Bounds(0, upper), limits))


def least_sent(volume: np.ndarray, per_node: int) -> float:
    """The least that the busiest sender can send off its node, for `volume[sender, batch]` and as many of both.

    x[b * nodes + n] says that batch b is on node n, and the last unknown is what the busiest sends.
    """
    d = len(volume)
    node_of = np.arange(d) // per_node
    nodes = int(node_of[-1]) + 1
    scale = volume.sum(axis=1).max()  # HiGHS's tolerances are absolute
    rows = lil_array((2 * d + nodes, d * nodes + 1))
    for batch in range(d):
        rows[batch, batch * nodes : (batch + 1) * nodes] = 1
        for sender in range(d):  # what it keeps, and the most that any sends, come to what it has
            rows[d + nodes + sender, batch * nodes + node_of[sender]] = volume[sender, batch] / scale
        for node in range(nodes):
            rows[d + node, batch * nodes + node] = 1
    rows[d + nodes :, d * nodes] = 1
    sent, rooms = volume.sum(axis=1) / scale, np.bincount(node_of)
    high = np.r_[np.ones(d), rooms, np.full(d, np.inf)]
    limits = LinearConstraint(rows.tocsr(), np.r_[np.ones(d), rooms, sent], high)
    upper = np.r_[np.ones(d * nodes), np.inf]
    most = np.r_[np.zeros(d * nodes), 1]
    return scale * _solved(most, np.r_[np.ones(d * nodes), 0], Bounds(0, upper), limits)


def _solved(objective: np.ndarray, integral: np.ndarray, bounds: Bounds, limits: LinearConstraint) -> float:
    answer = milp(objective, integrality=integral, bounds=bounds, constraints=limits, options={"mip_rel_gap": 1e-6})
    assert answer.success, answer.message
    return float(answer.fun)
