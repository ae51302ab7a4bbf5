"""LB-Micro: the same number of microbatches on every rank, each balanced against its neighbours on the other ranks.

This is the best a plan can do when ranks meet at every microbatch (collectives per layer). All microbatches of all
ranks are balanced at once, and those of similar cost are grouped into one step. The published LB-Micro fixes equal
sample counts per rank; `equal_samples=True` takes over this constraint, under which our own planner packs each rank
alone. Unless asked otherwise, these plans and plans of unequal sample counts are all tried and the shortest predicted
step wins, so that collectives are never compared at less than their best. Trying them takes about three times as long
as one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from odc.balance.cost import Cost, linear_cost
from odc.balance.inputs import Inputs, read_inputs
from odc.balance.packing import pack, pack_evenly
from odc.balance.plan import Plan
from odc.balance.refine import refine

_WORTH = 1e-3  # evening out microbatches further than this share of their cost costs time and gains nothing


def lb_micro(
    lengths: Sequence[int],
    ranks: int,
    max_tokens: int | Sequence[int],
    cost: Cost = linear_cost,
    seed: int = 0,
    *,
    equal_samples: bool = False,
    speeds: Sequence[float] | None = None,
    groups: Sequence[Hashable] | None = None,
) -> Plan:
    """Equal microbatch counts on all ranks, microbatch m taking nearly the same time on each.

    Args:
        lengths: tokens of every sample.
        ranks: number of ranks.
        max_tokens: hard cap on the tokens of a microbatch: one for all, or one a rank (0: no sample for this rank).
        cost: cost model; its unit is that of the plan.
        seed: decides between samples of equal cost and length, nothing else; 0 keeps the order they came in.
        equal_samples: only plans with equal sample counts per rank (differing by one where it does not divide), the
            constraint that verl and the published code have; groups must then be of one size.
        speeds: of every rank, numbers > 0; a rank of speed 0.5 takes twice the time. All alike unless given.
        groups: one name a sample; samples of one name stay on one rank (not in one microbatch).

    Where there are fewer samples than ranks * microbatches some microbatches are empty: place-holders that the rank
    runs as a dummy. Raises PlanError for bad input (see `odc.balance.inputs`).
    """
    inputs = read_inputs(lengths, ranks, max_tokens, cost, seed, speeds, groups)
    if equal_samples:
        return _plan(inputs, _rank_by_rank(inputs, inputs.spread(equal_sizes=True)))
    plans = tried(inputs)
    best = next(plans)
    for plan in plans:
        if _better(plan, best):
            best = plan
    return best


def tried(inputs: Inputs) -> Iterator[Plan]:
    """The plans that LB-Micro chooses from, at least one; with equal sample counts too where caps and groups allow."""
    yield _plan(inputs, _rank_by_rank(inputs, inputs.spread()))
    for ranks in _others(inputs):
        yield _plan(inputs, ranks)


def _plan(inputs: Inputs, ranks: list[list[list[int]]]) -> Plan:
    return Plan.of(ranks, inputs.costs, speeds=inputs.speeds, bound=inputs.bound)


def _better(plan: Plan, other: Plan) -> bool:
    """Shorter predicted step; at equal length fewer microbatches, then the shorter longest rank."""
    if abs(plan.stepped - other.stepped) > 1e-9 * other.stepped:
        return plan.stepped < other.stepped
    return (len(plan.ranks[0]), plan.longest) < (len(other.ranks[0]), other.longest)


def _others(inputs: Inputs) -> Iterator[list[list[list[int]]]]:
    """Equal sample counts, where caps and groups let them be; all microbatches at once, where ranks are alike."""
    if min(inputs.caps) == max(inputs.caps) and len({len(group) for group in inputs.groups}) == 1:
        yield _rank_by_rank(inputs, inputs.spread(equal_sizes=True))
    if inputs.sticky or not inputs.alike:
        return
    lengths, ranks, cap = inputs.lengths, inputs.ranks, inputs.caps[0]
    fewest = -(-len(pack(lengths, inputs.order, cap)) // ranks)
    for count in (fewest, fewest + 1):
        bins = pack_evenly(lengths, inputs.costs, inputs.order, ranks * count, cap)
        if bins is not None and (count == fewest or ranks * fewest < len(lengths)):
            yield _in_steps(_evened(inputs, bins, cap), inputs.costs, ranks)


def _rank_by_rank(inputs: Inputs, parts: list[list[int]]) -> list[list[list[int]]]:
    """As many microbatches on each rank as the fullest rank needs, costliest first."""
    packed = [pack(inputs.lengths, part, cap) for part, cap in zip(parts, inputs.caps, strict=True)]
    count = max(len(bins) for bins in packed)
    plan = []
    for part, bins, cap in zip(parts, packed, inputs.caps, strict=True):
        even = pack_evenly(inputs.lengths, inputs.costs, part, count, cap)
        bins = even if even is not None else bins + [[] for _ in range(count - len(bins))]
        bins = _evened(inputs, bins, cap)
        plan.append(sorted(bins, key=lambda mb: -sum(inputs.costs[i] for i in mb)))
    return plan


def _evened(inputs: Inputs, bins: list[list[int]], cap: int) -> list[list[int]]:
    return refine(bins, inputs.costs, lengths=inputs.lengths, max_tokens=cap, everywhere=True, worth=_WORTH)


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
