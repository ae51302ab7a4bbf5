"""verl's own way to spread a minibatch, to compare with.

It follows verl 0.9 (`RayPPOTrainer._balance_batch`, then `rearrange_micro_batches` with `same_micro_num_in_dp=True`) on
odc's Karmarkar-Karp. Each minibatch is balanced by itself, verl's kinder option (`keep_minibatch`).
"""

from __future__ import annotations

from collections.abc import Sequence

from odc.balance import Cost, Plan, quadratic
from odc.balance.karmarkar_karp import karmarkar_karp
from odc.errors import PlanError

#: What verl weighs a sample of l tokens with.
WORKLOAD: Cost = quadratic(24576, 1)


def verl_plan(lengths: Sequence[int], ranks: int, max_tokens: int, cost: Cost) -> Plan:
    """Equal sample counts on all ranks; on each as many microbatches as the fullest needs, of even workload.

    `cost` only prices the plan. Raises PlanError where verl would: samples that do not divide by the ranks, or one over
    the cap.
    """
    if len(lengths) % ranks:
        raise PlanError(f"{len(lengths)} samples do not divide by {ranks} ranks")
    if max(lengths) > max_tokens:
        raise PlanError(f"sample {lengths.index(max(lengths))} has {max(lengths)} tokens, the cap is {max_tokens}")
    work = [WORKLOAD(length) for length in lengths]
    parts = karmarkar_karp(work, ranks, _falling(work, range(len(work))), equal_sizes=True)
    count = max(min(len(part), -(-sum(lengths[i] for i in part) // max_tokens)) for part in parts)
    while True:  # ends at one sample a microbatch, at the latest
        split = [karmarkar_karp(work, count, _falling(work, part)) for part in parts]
        if all(bins and sum(lengths[i] for i in bins) <= max_tokens for rank in split for bins in rank):
            break
        count += 1
    return Plan.of([_small_at_both_ends(rank, work) for rank in split], [cost(length) for length in lengths])


def _falling(work: Sequence[float], some: Sequence[int]) -> list[int]:
    return sorted(some, key=lambda i: (-work[i], i))


def _small_at_both_ends(bins: list[list[int]], work: Sequence[float]) -> list[list[int]]:
    falling = sorted(bins, key=lambda some: -sum(work[i] for i in some))
    return falling[::2][::-1] + falling[1::2]
