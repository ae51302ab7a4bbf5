"""LB-Micro: the same number of microbatches on every rank, each balanced against its neighbours on the other ranks.

The best a plan can do when ranks meet at every microbatch (collectives per layer). Chose to balance all microbatches of
all ranks at once and to group those of similar cost into one step; the published LB-Micro first fixes equal sample
counts per rank and packs each rank alone (`equal_samples=True`). Both are tried unless asked otherwise and the one with
the shorter predicted step wins, so that collectives are never compared at less than their best.
"""

from __future__ import annotations

from collections.abc import Sequence

from odc.balance.cost import Cost, linear_cost
from odc.balance.inputs import costliest_first, sample_costs
from odc.balance.karmarkar_karp import karmarkar_karp
from odc.balance.packing import best_fit_decreasing, pack_evenly
from odc.balance.plan import Plan
from odc.balance.refine import refine

_WORTH = 1e-3  # evening out microbatches further than this share of their cost costs time and gains nothing


def lb_micro(
    lengths: Sequence[int],
    ranks: int,
    max_tokens: int,
    cost: Cost = linear_cost,
    seed: int = 0,
    *,
    equal_samples: bool = False,
) -> Plan:
    """Equal microbatch counts on all ranks, microbatch m costing nearly the same on each.

    Args:
        lengths: tokens of every sample.
        ranks: number of ranks.
        max_tokens: hard cap on the tokens of a microbatch.
        cost: cost model.
        seed: decides between samples of equal cost, nothing else.
        equal_samples: only plans with equal sample counts per rank (differing by one where it does not divide), as
            verl and the published code make them.

    Where there are fewer samples than ranks * microbatches some microbatches are empty: place-holders that the rank
    runs as a dummy. Raises PlanError for bad input (see `odc.balance.inputs`).
    """
    costs = sample_costs(lengths, ranks, max_tokens, cost)
    order = costliest_first(costs, seed)
    best = Plan.of(_rank_by_rank(lengths, costs, order, ranks, max_tokens), costs)
    if equal_samples:
        return best
    fewest = -(-len(best_fit_decreasing(lengths, order, max_tokens)) // ranks)
    for count in (fewest, fewest + 1):
        bins = pack_evenly(lengths, costs, order, ranks * count, max_tokens)
        if bins is None or (count > fewest and ranks * (count - 1) >= len(lengths)):
            continue
        bins = refine(bins, costs, lengths=lengths, max_tokens=max_tokens, everywhere=True, worth=_WORTH)
        plan = Plan.of(_in_steps(bins, costs, ranks), costs)
        if _better(plan, best):
            best = plan
    return best


def _better(plan: Plan, other: Plan) -> bool:
    """Shorter predicted step; at equal length fewer microbatches, then the shorter longest rank."""
    if abs(plan.stepped - other.stepped) > 1e-9 * other.stepped:
        return plan.stepped < other.stepped
    return (len(plan.ranks[0]), plan.longest) < (len(other.ranks[0]), other.longest)


def _rank_by_rank(
    lengths: Sequence[int], costs: Sequence[float], order: Sequence[int], ranks: int, max_tokens: int
) -> list[list[list[int]]]:
    """Equal sample counts first, then as many microbatches on each rank as the fullest rank needs, costliest first."""
    parts = karmarkar_karp(costs, ranks, order, equal_sizes=True)
    count = max(len(best_fit_decreasing(lengths, part, max_tokens)) for part in parts)
    position = {i: at for at, i in enumerate(order)}
    plan = []
    for part in parts:
        bins = pack_evenly(lengths, costs, sorted(part, key=position.__getitem__), count, max_tokens)
        assert bins is not None, "best-fit decreasing already found a way"
        bins = refine(bins, costs, lengths=lengths, max_tokens=max_tokens, everywhere=True, worth=_WORTH)
        plan.append(sorted(bins, key=lambda mb: -sum(costs[i] for i in mb)))
    return plan


def _in_steps(bins: list[list[int]], costs: Sequence[float], ranks: int) -> list[list[list[int]]]:
    """Microbatches of similar cost form one step; in a step the costliest goes to the rank with the least so far."""
    loads = [sum(costs[i] for i in mb) for mb in bins]
    falling = sorted(range(len(bins)), key=lambda b: -loads[b])
    plan: list[list[list[int]]] = [[] for _ in range(ranks)]
    totals = [0.0] * ranks
    for start in range(0, len(falling), ranks):
        lightest_first = sorted(range(ranks), key=lambda r: (totals[r], r))
        for b, rank in zip(falling[start : start + ranks], lightest_first, strict=True):
            plan[rank].append(bins[b])
            totals[rank] += loads[b]
    return plan
