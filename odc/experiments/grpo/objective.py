"""GRPO as verl defines it: advantages of a group, the policy loss of a token, the KL estimate, and verl's plans.

The formulae are DeepSeekMath (arXiv 2402.03300) for the advantage, PPO (1707.06347) for the clip,
1912.09729 for the dual clip, Schulman's note on KL approximation for k3. Losses are averaged over the response tokens
of the whole minibatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from odc.balance import Cost, Plan, quadratic
from odc.balance.karmarkar_karp import karmarkar_karp
from odc.errors import ConfigError, PlanError
from odc.experiments.grpo.config import GrpoConfig

#: What verl weighs a sample of l tokens with.
VERL_WORKLOAD: Cost = quadratic(24576, 1)
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


@dataclass(frozen=True)
class Objective:
    """Whose formulae a job uses: `advantages` as `grpo_advantages`, and `loss`.

    `loss(log_probs, old_log_probs, reference or None, advantages, tokens, ranks)` is a scalar, of the response tokens
    [T] of one microbatch, scaled so that FSDP's average over `ranks` is the mean over the minibatch's `tokens`.
    """

    name: str
    advantages: Callable[[Tensor, Sequence[int]], Tensor]
    loss: Callable[[Tensor, Tensor, Tensor | None, Tensor, int, int], Tensor]


def objective_named(config: GrpoConfig) -> Objective:
    """The objective that `config` asks for; raises `ConfigError` if verl is asked for and not installed."""
    installed = find_spec("verl") is not None
    if config.objective == "verl" and not installed:
        raise ConfigError("objective verl needs verl: pip install verl, or use --objective odc, the same formulae")
    return _verl(config) if installed and config.objective != "odc" else _own(config)


def _own(config: GrpoConfig) -> Objective:
    def loss(
        log_probs: Tensor, old: Tensor, reference: Tensor | None, advantages: Tensor, tokens: int, ranks: int
    ) -> Tensor:
        losses = policy_losses(
            log_probs, old, advantages, low=config.clip_low, high=config.clip_high, dual=config.clip_dual
        )
        if reference is not None:
            losses = losses + config.kl * kl_estimate(log_probs, reference)
        return losses.sum() * (ranks / tokens)

    return Objective("odc", grpo_advantages, loss)


def _verl(config: GrpoConfig) -> Objective:
    from omegaconf import OmegaConf
    from verl.trainer.ppo import core_algos

    clips = {"clip_ratio_low": config.clip_low, "clip_ratio_high": config.clip_high, "clip_ratio_c": config.clip_dual}
    clips["clip_ratio"] = config.clip_low

    def advantages(rewards: Tensor, groups: Sequence[int]) -> Tensor:
        mask = torch.ones(len(rewards), 1)
        found, _ = core_algos.compute_grpo_outcome_advantage(
            rewards.clone()[:, None], mask, np.asarray(groups), _EPSILON
        )
        return torch.as_tensor(found)[:, 0]

    def loss(
        log_probs: Tensor, old: Tensor, reference: Tensor | None, advantage: Tensor, tokens: int, ranks: int
    ) -> Tensor:
        batch: dict[str, Any] = {"dp_size": ranks, "batch_num_tokens": tokens}
        chosen = OmegaConf.create(clips | {"global_batch_info": batch})
        mask = torch.ones_like(log_probs, dtype=torch.bool)[None]
        found, _ = core_algos.compute_policy_loss_vanilla(
            old[None], log_probs[None], advantage[None], mask, "token-mean", chosen
        )
        if reference is not None:
            apart = core_algos.kl_penalty(log_probs[None], reference[None], "low_var_kl")
            found = found + config.kl * core_algos.agg_loss(apart, mask, "token-mean", **batch)
        return torch.as_tensor(found)

    return Objective("verl", advantages, loss)


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
    return Plan.of([_small_at_both_ends(rank, work) for rank in split], [cost(length) for length in lengths])


def _falling(work: Sequence[float], some: Sequence[int]) -> list[int]:
    return sorted(some, key=lambda i: (-work[i], i))


def _small_at_both_ends(bins: list[list[int]], work: Sequence[float]) -> list[list[int]]:
    falling = sorted(bins, key=lambda some: -sum(work[i] for i in some))
    return falling[::2][::-1] + falling[1::2]
