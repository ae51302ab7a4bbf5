"""LB-Dynamic: one list of microbatches for all ranks, costliest first, from which whoever is free takes the next.

Chose many small microbatches over few full ones: what a rank waits for at the end is at most one microbatch, and the
last ones of a falling list are the smallest. Short samples share one until it holds a rank's share of the tokens
divided by `per_rank`; longer ones stand alone. The price is more forwards and backwards, so more fetches and pushes.

Which rank computes what is found out while the minibatch runs (`odc.runtime.queue`). The plan returned here is list
scheduling (Graham 1969) by the cost model: what happens when every rank is as fast as the model says. Its *order* is
what counts, and no plan of the same microbatches has a longest rank shorter than this one by more than a quarter
(4/3 - 1/(3 ranks), same source).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from odc.balance.cost import Cost, linear_cost
from odc.balance.inputs import read_inputs
from odc.balance.packing import best_fit_decreasing
from odc.balance.plan import Plan


def lb_dynamic(
    lengths: Sequence[int],
    ranks: int,
    max_tokens: int,
    cost: Cost = linear_cost,
    seed: int = 0,
    *,
    per_rank: int = 8,
) -> Plan:
    """The microbatches of one minibatch and who is predicted to compute them; `queue_of` gives the list.

    Args:
        lengths: tokens of every sample.
        ranks: number of ranks.
        max_tokens: hard cap on the tokens of a microbatch.
        cost: cost model; orders the list and predicts, nothing else.
        seed: decides between samples of equal cost, nothing else.
        per_rank: microbatches that an average rank computes, at least 1; fewer where samples are few or the longest
            stand alone.

    No microbatch is empty. Raises PlanError for bad input (see `odc.balance.inputs`).
    """
    inputs = read_inputs(lengths, ranks, max_tokens, cost, seed, None, None)
    costs, order = inputs.costs, inputs.order
    share = min(max_tokens, sum(lengths) // (ranks * max(1, per_rank)))
    microbatches = [[i] for i in order if lengths[i] > share]
    microbatches += best_fit_decreasing(lengths, [i for i in order if lengths[i] <= share], share)
    microbatches.sort(key=lambda mb: -sum(costs[i] for i in mb))
    plan: list[list[list[int]]] = [[] for _ in range(ranks)]
    free = [(0.0, rank) for rank in range(ranks)]
    for microbatch in microbatches:
        at, rank = free[0]
        plan[rank].append(microbatch)
        heapq.heapreplace(free, (at + sum(costs[i] for i in microbatch), rank))
    return Plan.of(plan, costs, bound=inputs.bound)


def queue_of(plan: Plan) -> list[tuple[list[int], float]]:
    """(sample indices, predicted cost) of every microbatch of a plan, costliest first; empty ones are left out."""
    listed = [
        (microbatch, cost)
        for microbatches, costs in zip(plan.ranks, plan.costs, strict=True)
        for microbatch, cost in zip(microbatches, costs, strict=True)
        if microbatch
    ]
    return sorted(listed, key=lambda entry: -entry[1])
