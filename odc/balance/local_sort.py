"""LocalSort: samples stay where the data loader put them; each rank sorts its own, one sample per microbatch.

The reference without balancing or packing: equal sample counts, dealt in arrival order. Sorting makes the ranks' m-th
microbatches similar, which is all it can do against a barrier per microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence

from odc.balance.cost import Cost, linear_cost
from odc.balance.inputs import sample_costs
from odc.balance.plan import Plan


def local_sort(lengths: Sequence[int], ranks: int, max_tokens: int, cost: Cost = linear_cost, seed: int = 0) -> Plan:
    """Deal sample i to rank i % ranks; each rank runs its samples longest first, one per microbatch.

    Args:
        lengths: tokens of every sample, in arrival order.
        ranks: number of ranks.
        max_tokens: cap on the tokens of a microbatch.
        cost: cost model; here it only predicts.
        seed: not used, nothing is drawn; part of every policy's signature.

    Raises PlanError for bad input (see `odc.balance.inputs`). With fewer samples than ranks some ranks get none.
    """
    del seed
    costs = sample_costs(lengths, ranks, max_tokens, cost)
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    plan: list[list[list[int]]] = [[] for _ in range(ranks)]
    for i in order:
        plan[i % ranks].append([i])
    return Plan.of(plan, costs)
