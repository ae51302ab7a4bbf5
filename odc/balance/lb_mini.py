"""LB-Mini: even out the whole minibatch; ranks get unequal samples and unequal numbers of microbatches.

What on-demand communication makes possible: ranks meet once per minibatch, so only each rank's total counts. Chose the
best of Karmarkar-Karp, longest-processing-time-first and LB-Micro's grouping, each refined, over one method: none wins
everywhere, and this one is then never behind LB-Micro. The price is about three times the planning time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from odc.balance.bound import lower_bound
from odc.balance.cost import Cost, linear_cost
from odc.balance.inputs import costliest_first, sample_costs
from odc.balance.karmarkar_karp import karmarkar_karp
from odc.balance.lb_micro import lb_micro
from odc.balance.packing import best_fit_decreasing, pack_evenly
from odc.balance.plan import Plan
from odc.balance.refine import refine


def lb_mini(lengths: Sequence[int], ranks: int, max_tokens: int, cost: Cost = linear_cost, seed: int = 0) -> Plan:
    """Ranks of nearly equal cost, each with as few microbatches as best-fit decreasing needs for its samples.

    A rank's microbatches are as even in tokens as their number allows: the fullest one decides how much memory
    activations take.

    Args:
        lengths: tokens of every sample.
        ranks: number of ranks. With fewer samples than ranks, or giants among them, some ranks may get no sample.
        max_tokens: hard cap on the tokens of a microbatch.
        cost: cost model.
        seed: decides between samples of equal cost, nothing else.

    No microbatch is empty. Raises PlanError for bad input (see `odc.balance.inputs`).
    """
    costs = sample_costs(lengths, ranks, max_tokens, cost)
    order = costliest_first(costs, seed)
    bound = lower_bound(costs, ranks)
    parts = _evenest_parts(lengths, ranks, max_tokens, cost, seed, costs, order, bound)
    plan = []
    for part in parts:
        microbatches = _few_and_even(lengths, part, max_tokens)
        plan.append(sorted(microbatches, key=lambda mb: -sum(costs[i] for i in mb)))
    return Plan.of(plan, costs)


def _evenest_parts(
    lengths: Sequence[int],
    ranks: int,
    max_tokens: int,
    cost: Cost,
    seed: int,
    costs: Sequence[float],
    order: Sequence[int],
    bound: float,
) -> list[list[int]]:
    """The partition with the lowest longest rank among the candidates; one that meets the bound ends the search."""
    candidates: tuple[Callable[[], list[list[int]]], ...] = (
        lambda: karmarkar_karp(costs, ranks, order),
        lambda: _longest_first(costs, ranks, order),
        lambda: [[i for mb in mbs for i in mb] for mbs in lb_micro(lengths, ranks, max_tokens, cost, seed).ranks],
    )
    best: list[list[int]] = []
    best_longest = float("inf")
    for candidate in candidates:
        parts = refine(candidate(), costs, floor=bound)
        longest = max(sum(costs[i] for i in part) for part in parts)
        if longest < best_longest:
            best, best_longest = parts, longest
        if best_longest <= bound * (1 + 1e-9):
            break
    return best


def _few_and_even(lengths: Sequence[int], part: Sequence[int], max_tokens: int) -> list[list[int]]:
    """The samples of one rank in microbatches; none is empty."""
    tight = best_fit_decreasing(lengths, part, max_tokens)
    longest_first = sorted(part, key=lambda i: -lengths[i])
    return pack_evenly(lengths, lengths, longest_first, len(tight), max_tokens) or tight


def _longest_first(costs: Sequence[float], ranks: int, order: Sequence[int]) -> list[list[int]]:
    """Each sample, costliest first, to the rank with the least cost so far."""
    parts: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0.0, rank) for rank in range(ranks)]
    for i in order:
        load, rank = heap[0]
        parts[rank].append(i)
        heapq.heapreplace(heap, (load + costs[i], rank))
    return parts
