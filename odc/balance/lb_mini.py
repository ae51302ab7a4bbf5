"""LB-Mini: even out the whole minibatch; ranks get unequal samples and unequal numbers of microbatches.

What on-demand communication makes possible: ranks meet once per minibatch, so only each rank's total counts. Chose one
partition of the samples over ranks, and then packing on each rank alone, over both at once: the number of microbatches
costs little next to a rank that is late. The price is that a rank may need one more than another split would. Where the
bound is not met, few samples are also spread in all ways that LB-Micro tries, which is then never more than 0.1% ahead.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from odc.balance.cost import Cost, linear_cost
from odc.balance.inputs import Inputs, read_inputs
from odc.balance.lb_micro import tried
from odc.balance.packing import STEPS, pack, pack_evenly
from odc.balance.plan import Plan

_ALL_STEPS = 1_000_000  # of the searches for one microbatch fewer, over all ranks
_FEW, _NEAR = 1024, 1e-3


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

    A rank's microbatches are as even in tokens as their number allows: the fullest one decides how much memory
    activations take.

    Args:
        lengths: tokens of every sample.
        ranks: number of ranks. With fewer samples than ranks, or giants among them, some ranks may get no sample.
        max_tokens: hard cap on the tokens of a microbatch: one for all, or one a rank (0: no sample for this rank).
        cost: cost model; its unit is that of the plan.
        seed: decides between samples of equal cost and length, nothing else; 0 keeps the order they came in.
        speeds: of every rank, numbers > 0; a rank of speed 0.5 takes twice the time. All alike unless given.
        groups: one name a sample; samples of one name stay on one rank (not in one microbatch).

    No microbatch is empty. Raises PlanError for bad input (see `odc.balance.inputs`).
    """
    inputs = read_inputs(lengths, ranks, max_tokens, cost, seed, speeds, groups)
    plan = _packed(inputs, inputs.spread())
    if len(lengths) <= _FEW and plan.gap > _NEAR:
        other = min(tried(inputs), key=lambda plan: plan.longest)
        if other.longest < plan.longest * (1 - _NEAR):
            return _packed(inputs, [[i for mb in microbatches for i in mb] for microbatches in other.ranks])
    return plan


def _packed(inputs: Inputs, parts: list[list[int]]) -> Plan:
    steps = min(STEPS, _ALL_STEPS // inputs.ranks)
    plan = []
    for part, cap in zip(parts, inputs.caps, strict=True):
        microbatches = few_and_even(inputs.lengths, part, cap, steps)
        plan.append(sorted(microbatches, key=lambda mb: -sum(inputs.costs[i] for i in mb)))
    return Plan.of(plan, inputs.costs, speeds=inputs.speeds, bound=inputs.bound)


def few_and_even(lengths: Sequence[int], part: Sequence[int], max_tokens: int, steps: int) -> list[list[int]]:
    """The samples of one rank in microbatches; none is empty."""
    tight = pack(lengths, part, max_tokens, steps)
    if len(tight) < 2:
        return tight
    longest_first = sorted(part, key=lambda i: -lengths[i])
    return pack_evenly(lengths, lengths, longest_first, len(tight), max_tokens) or tight
