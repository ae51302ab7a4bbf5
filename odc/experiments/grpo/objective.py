"""GRPO as verl defines it: advantages of a group, the policy loss of a token, the KL estimate, and verl's plans.

The formulae are DeepSeekMath (arXiv 2402.03300) for the advantage, PPO (1707.06347) for the clip,
1912.09729 for the dual clip, Schulman's note on KL approximation for k3. Losses are averaged over the response tokens
of the whole minibatch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from odc.balance import Cost, Plan
from odc.balance.cost import VERL_WORKLOAD
from odc.balance.karmarkar_karp import karmarkar_karp
from odc.balance.packing import small_at_both_ends
from odc.errors import PlanError
from odc.experiments.config import GrpoConfig

_EPSILON = 1e-6
_LARGEST_LOG = 20.0


def grpo_advantages(rewards: Tensor, groups: Sequence[int]) -> Tensor:
    """How much better each response is than the others to its prompt, in standard deviations of the group.

    Responses with one name in `groups` [N] are compared by their `rewards`, fp32 [N]. Returns fp32 [N]: (reward - mean)
    / (std + 1e-6), std with Bessel's correction; a group of one keeps its reward.
    """
    advantages = torch.empty_like(rewards)
    numbers: dict[int, int] = {}
    names = torch.tensor([numbers.setdefault(group, len(numbers)) for group in groups])
    for number in range(len(numbers)):
        where = names == number
        members = rewards[where]
        if len(members) == 1:
            advantages[where] = members / (1.0 + _EPSILON)
        else:
            advantages[where] = (members - members.mean()) / (members.std() + _EPSILON)
    return advantages


def policy_losses(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, low: float, high: float, dual: float
) -> Tensor:
    """Clipped policy loss of each token, with the dual clip where the advantage is negative. All fp32 [T]."""
    ratio = (log_probs - old_log_probs).clamp(-_LARGEST_LOG, _LARGEST_LOG).exp()
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    return torch.where(advantages < 0, torch.minimum(-advantages * dual, losses), losses)


def kl_estimate(log_probs: Tensor, reference: Tensor) -> Tensor:
    """The k3 estimate of KL(policy || reference) at each token: never negative, low variance. All fp32 [T]."""
    apart = (reference - log_probs).clamp(-_LARGEST_LOG, _LARGEST_LOG)
    return (apart.exp() - apart - 1).clamp(-10, 10)


def grpo_loss(
    config: GrpoConfig,
    log_probs: Tensor,
    old_log_probs: Tensor,
    reference: Tensor | None,
    advantages: Tensor,
    tokens: int,
    ranks: int,
) -> Tensor:
    """The loss of one microbatch's response tokens [T], a scalar; `reference` gives the KL term, None leaves it out.

    It is scaled so that FSDP's average over `ranks` is the mean over the minibatch's `tokens`.
    """
    clips = {"low": config.clip_low, "high": config.clip_high, "dual": config.clip_dual}
    losses = policy_losses(log_probs, old_log_probs, advantages, **clips)
    if reference is not None:
        losses = losses + config.kl * kl_estimate(log_probs, reference)
    return losses.sum() * (ranks / tokens)


def verl_plan(lengths: Sequence[int], ranks: int, max_tokens: int, cost: Cost) -> Plan:
    """Equal sample counts on all ranks; on each as many microbatches as the fullest needs, of even workload.

    As verl 0.9 spreads a minibatch (`RayPPOTrainer._balance_batch`, then `rearrange_micro_batches` with
    `same_micro_num_in_dp=True`), on odc's Karmarkar-Karp. Each minibatch is balanced by itself, verl's kinder option
    (`keep_minibatch`).

    `cost` only prices the plan. Raises PlanError where verl would: samples that do not divide by the ranks, or one over
    the cap.
    """
    if len(lengths) % ranks:
        raise PlanError(f"{len(lengths)} samples do not divide by {ranks} ranks")
    if max(lengths) > max_tokens:
        raise PlanError(f"sample {lengths.index(max(lengths))} has {max(lengths)} tokens, the cap is {max_tokens}")
    work = [VERL_WORKLOAD(length) for length in lengths]
    parts = karmarkar_karp(work, ranks, _falling(work, range(len(work))), equal_sizes=True)
    count = max(min(len(part), -(-sum(lengths[i] for i in part) // max_tokens)) for part in parts)
    while True:  # ends at one sample a microbatch, at the latest
        split = [karmarkar_karp(work, count, _falling(work, part)) for part in parts]
        if all(bins and sum(lengths[i] for i in bins) <= max_tokens for rank in split for bins in rank):
            break
        count += 1
    ordered = [small_at_both_ends(sorted(rank, key=lambda some: -sum(work[i] for i in some))) for rank in split]
    return Plan.of(ordered, [cost(length) for length in lengths])


def _falling(work: Sequence[float], some: Sequence[int]) -> list[int]:
    return sorted(some, key=lambda i: (-work[i], i))
