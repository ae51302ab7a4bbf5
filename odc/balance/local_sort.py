"""LocalSort: samples stay where the data loader put them; each rank sorts its own, one sample per microbatch.

The reference without balancing or packing: equal sample counts, dealt in arrival order. Sorting makes the ranks' m-th
microbatches similar, which is all it can do against a barrier per microbatch.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from odc.balance.cost import Cost, linear_cost
from odc.balance.inputs import read_inputs
from odc.balance.plan import Plan


def local_sort(
    lengths: Sequence[int],
    ranks: int,
    max_tokens: int | Sequence[int],
    cost: Cost = linear_cost,
    seed: int = 0,
    *,
    speeds: Sequence[float] | None = None,
    groups: Sequence[Hashable] | None = None,
) -> Plan:
    """Deal samples round robin, or groups of samples; each rank runs its own longest first, one per microbatch.

    Args:
        lengths: tokens of every sample, in arrival order.
        ranks: number of ranks.
        max_tokens: cap on the tokens of a microbatch, or one cap a rank: one too low for a sample is passed over.
        cost: cost model; here it only predicts.
        seed: not used, nothing is drawn; part of every policy's signature.
        speeds: of every rank; here they only predict.
        groups: one name a sample; samples of one name stay on one rank.

    Raises PlanError for bad input (see `odc.balance.inputs`). With fewer samples than ranks some ranks get none.
    """
    inputs = read_inputs(lengths, ranks, max_tokens, cost, seed, speeds, groups)
    plan: list[list[list[int]]] = [[] for _ in range(ranks)]
    turn = 0
    for group in inputs.groups:
        longest = max(inputs.lengths[i] for i in group)
        while inputs.caps[turn % ranks] < longest:
            turn += 1
        plan[turn % ranks] += [[i] for i in group]
        turn += 1
    for microbatches in plan:
        microbatches.sort(key=lambda mb: (-inputs.lengths[mb[0]], mb[0]))
    return Plan.of(plan, inputs.costs, speeds=inputs.speeds, bound=inputs.bound)
