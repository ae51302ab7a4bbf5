"""Algorithm 3 as an integer program: which node gets which new mini-batch, solved by HiGHS through scipy."""

from __future__ import annotations

from typing import Any

import numpy as np

from odc.dispatch.rearrangement import Ints
from odc.errors import PlanError, install

_TOLERANCE = 2e-6  # by which HiGHS may overstate a bound: rows may be violated by 1e-6, and 1e-6 more is left to round


def solve(
    volume: Ints, rooms: Ints, node_of: Ints, *, relaxed: bool = False, limit_s: float | None = None
) -> tuple[Ints | None, float]:
    """Minimize the most that any sender sends off its node.

    Args:
        volume: int64 [d batches, d senders] what each sender has of each batch.
        rooms: int64 [m] batches that each node takes; the sum is d.
        node_of: int64 [d] node of each sender.
        relaxed: solve the linear relaxation, which gives a bound only.
        limit_s: give up then; the result may differ between ranks.

    Returns the node of each batch (None if relaxed, or if none was found in time) and a lower bound on the objective.
    Raises PlanError, naming the extra, without scipy.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array, csr_array, hstack, vstack
    except ImportError as error:
        raise PlanError(f"the exact node-wise rearrangement needs scipy: {install('dispatch')}") from error
    d, m = len(volume), len(rooms)
    count = d * m  # x[j, a] at j * m + a: batch j on node a; then the cost
    scale = float(max(1, volume.sum(axis=0).max()))  # HiGHS's tolerances are absolute
    place = np.arange(count)
    one_node = coo_array((np.ones(count), (place // m, place)), shape=(d, count + 1))
    full = coo_array((np.ones(count), (place % m, place)), shape=(m, count + 1))
    batches, senders = np.nonzero(volume)
    kept = coo_array((volume[batches, senders] / scale, (senders, batches * m + node_of[senders])), shape=(d, count))
    sent = volume.sum(axis=0) / scale
    rows: Any = hstack([csr_array(kept), csr_array(np.ones((d, 1)))])  # kept + cost >= sent
    constraints = LinearConstraint(
        vstack([one_node, full, rows]).tocsr(),
        np.concatenate([np.ones(d), rooms, sent]),
        np.concatenate([np.ones(d), rooms, np.full(d, np.inf)]),
    )
    bounds = Bounds(np.zeros(count + 1), np.append(np.ones(count), np.inf))
    whole = np.zeros(count + 1) if relaxed else np.append(np.ones(count), 0)
    goal = np.append(np.zeros(count), 1.0)
    options = {"mip_rel_gap": 0.0} | ({} if limit_s is None else {"time_limit": limit_s})
    found = milp(goal, integrality=whole, bounds=bounds, constraints=constraints, options=options)
    bound = found.mip_dual_bound if not relaxed and found.mip_dual_bound is not None else found.fun
    nodes = None if relaxed or found.x is None else found.x[:-1].reshape(d, m).argmax(axis=1).astype(np.int64)
    return nodes, max(0.0, float(bound or 0.0) - _TOLERANCE) * scale
