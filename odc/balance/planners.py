"""The planners: functions from the lengths of a minibatch to a plan."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Sequence

from odc.balance.cost import Cost, linear_cost
from odc.balance.inputs import Inputs, read_inputs
from odc.balance.packing import STEPS, best_fit_decreasing, pack, pack_evenly
from odc.balance.partition import refine
from odc.balance.plan import Plan
from odc.errors import PlanError

_ALL_STEPS = 1_000_000  # of the searches for one microbatch fewer, over all ranks
_FEW, _NEAR = 1024, 1e-3  # samples up to which, and gap from which, `lb_mini` tries other plans
_WORTH = 1e-3  # evening out microbatches further than this share of their cost costs time and gains nothing


def lb_mini(
    lengths: Sequence[int],
    ranks: int,
    max_tokens: int | Sequence[int],
    cost: Cost = linear_cost,
    seed: int = 0,
    *,
    speeds: Sequence[float] | None = None,
    groups: Sequence[Hashable] | None = None,
) -> Plan:
    """Ranks that end at nearly the same time; each packs its samples into as few microbatches as are found.

    Ranks may have unequal numbers of samples and microbatches, and no microbatch is empty. A rank's microbatches are as
    even in tokens as their number allows, because the fullest one decides how much memory activations take. Where the
    bound is not met, small inputs are also spread in every way that `lb_micro` tries, so `lb_micro` is never more than
    0.1% ahead.

    Args:
        lengths: tokens of every sample, in arrival order.
        ranks: where samples are few, some may get none.
        max_tokens: hard cap on the tokens of a microbatch: one for all ranks, or one a rank (0: no sample for it).
        cost: cost model; its unit is the plan's unit.
        seed: decides between samples of equal cost and length, nothing else; 0 keeps their arrival order.
        speeds: one number above 0 a rank; a rank of speed 0.5 takes twice the time. All alike unless given.
        groups: one name a sample; samples of one name stay on one rank, though not in one microbatch.

    Raises PlanError for bad input; see `odc.balance.inputs.read_inputs`.
    """
    inputs = read_inputs(lengths, ranks, max_tokens, cost, seed, speeds, groups)
    plan = _packed(inputs, inputs.spread())
    if len(lengths) <= _FEW and plan.gap > _NEAR:
        other = min(_tried(inputs), key=lambda plan: plan.longest)
        if other.longest < plan.longest * (1 - _NEAR):
            return _packed(inputs, [[i for mb in microbatches for i in mb] for microbatches in other.ranks])
    return plan


def _packed(inputs: Inputs, parts: list[list[int]]) -> Plan:
    steps = min(STEPS, _ALL_STEPS // inputs.ranks)
    plan = []
    for part, cap in zip(parts, inputs.caps, strict=True):
        bins = few_and_even(inputs.lengths, part, cap, steps)
        plan.append(sorted(bins, key=lambda mb: -sum(inputs.costs[i] for i in mb)))
    return _plan(inputs, plan)


def few_and_even(lengths: Sequence[int], part: Sequence[int], max_tokens: int, steps: int) -> list[list[int]]:
    """The samples of one rank in microbatches; none is empty."""
    tight = pack(lengths, part, max_tokens, steps)
    if len(tight) < 2:
        return tight
    longest_first = sorted(part, key=lambda i: -lengths[i])
    return pack_evenly(lengths, lengths, longest_first, len(tight), max_tokens) or tight


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

    For ranks that wait for each other at every microbatch. Plans with equal sample counts, with unequal ones, and
    with all microbatches balanced at once are tried, and the shortest predicted step wins. Empty microbatches are
    placeholders that a rank runs as a dummy. Arguments and errors as `lb_mini`, and:

    Args:
        equal_samples: only plans with equal sample counts per rank (differing by one where it does not divide), as verl
            and the published code make them; groups must then be of one size.
    """
    inputs = read_inputs(lengths, ranks, max_tokens, cost, seed, speeds, groups)
    if equal_samples:
        return _plan(inputs, _rank_by_rank(inputs, inputs.spread(equal_sizes=True)))
    plans = _tried(inputs)
    best = next(plans)
    for plan in plans:
        if _better(plan, best):
            best = plan
    return best


def _tried(inputs: Inputs) -> Iterator[Plan]:
    """The plans that `lb_micro` chooses from, at least one."""
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
    """Equal sample counts, where caps and groups allow them; all microbatches at once, where ranks are alike."""
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
    return refine(bins, inputs.costs, lengths=inputs.lengths, max_tokens=cap, worth=_WORTH)


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
    """Deal samples round robin; each rank runs its longest first, one sample a microbatch.

    The reference without balancing or packing. Groups are dealt whole. A rank whose cap is too low for a sample is
    passed over; `cost` and `speeds` only predict, and `seed` is not used. Arguments and errors as `lb_mini`.
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
    return _plan(inputs, plan)


def lb_dynamic(
    lengths: Sequence[int], ranks: int, max_tokens: int, cost: Cost = linear_cost, seed: int = 0, *, per_rank: int = 8
) -> Plan:
    """One list of many small microbatches, costliest first, from which whichever rank is free takes the next.

    Short samples share a microbatch until it holds a rank's share of the tokens divided by `per_rank`; longer ones
    stand alone, and none is empty. Which rank computes which microbatch is decided while the minibatch runs
    (`odc.protocol.queue`); the plan returned here is list scheduling by the cost model, at most 4/3 - 1/(3 ranks) of
    the best plan of these microbatches (Graham 1969). `queue_of` gives the list. Arguments and errors as `lb_mini`,
    and:

    Args:
        per_rank: microbatches that an average rank computes, at least 1; fewer where samples are few or the longest
            stand alone.
    """
    inputs = read_inputs(lengths, ranks, max_tokens, cost, seed, None, None)
    if len({*inputs.caps}) > 1:
        raise PlanError(f"lb_dynamic takes one max_tokens, as any rank may compute any microbatch; got {inputs.caps}")
    costs, order, known = inputs.costs, inputs.order, inputs.lengths
    share = min(*inputs.caps, sum(known) // (ranks * max(1, per_rank)))
    microbatches = [[i] for i in order if known[i] > share]
    microbatches += best_fit_decreasing(known, [i for i in order if known[i] <= share], share)
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
