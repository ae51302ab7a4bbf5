from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from odc.experiments.config import GrpoConfig
from odc.experiments.grpo.objective import grpo_advantages, grpo_loss, kl_estimate, policy_losses

# the formulae, a number at a time, as the papers have them -----------------------------------------------------------


def plain_advantages(rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    found = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        mean, std = (statistics.fmean(members), statistics.stdev(members)) if len(members) > 1 else (0.0, 1.0)
        found.append((reward - mean) / (std + 1e-6))
    return found


def plain_loss(log_prob: float, old: float, advantage: float, low: float, high: float, dual: float) -> float:
    ratio = math.exp(min(20.0, max(-20.0, log_prob - old)))
    clipped = min(1 + high, max(1 - low, ratio))
    loss = max(-advantage * ratio, -advantage * clipped)
    return min(loss, -advantage * dual) if advantage < 0 else loss


def plain_kl(log_prob: float, reference: float) -> float:
    apart = min(20.0, max(-20.0, reference - log_prob))
    return min(10.0, math.exp(apart) - apart - 1)


tokens = st.tuples(st.floats(-30, 0), st.floats(-30, 0), st.floats(-30, 0), st.floats(-3, 3))


@given(st.lists(st.tuples(st.floats(-2, 2, width=16), st.integers(0, 3)), min_size=1, max_size=12))
def test_advantages(samples: list[tuple[float, int]]) -> None:
    rewards, groups = zip(*samples, strict=True)
    expected = torch.tensor(plain_advantages(rewards, groups))
    found = grpo_advantages(torch.tensor(rewards), groups)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@given(st.lists(tokens, min_size=1, max_size=20))
def test_token_losses(rows: list[tuple[float, float, float, float]]) -> None:
    log_probs, old, reference, advantages = (torch.tensor(column) for column in zip(*rows, strict=True))
    found = policy_losses(log_probs, old, advantages, low=0.2, high=0.3, dual=3.0)
    expected = [plain_loss(a, b, d, 0.2, 0.3, 3.0) for a, b, _, d in rows]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-5)
    expected = [plain_kl(a, c) for a, _, c, _ in rows]
    torch.testing.assert_close(kl_estimate(log_probs, reference), torch.tensor(expected), rtol=1e-3, atol=1e-4)


def draw(count: int, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(count, generator=generator)
    log_probs = old + 0.5 * torch.randn(count, generator=generator)
    reference = old + 0.3 * torch.randn(count, generator=generator)
    return log_probs, old, reference, torch.randn(count, generator=generator)


Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, int, int], torch.Tensor]


def loss_and_gradient(
    objective: Loss, parts: list[slice], ranks: int, with_kl: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of 60 tokens in `parts`, one microbatch each, averaged over ranks as FSDP does."""
    log_probs, old, reference, advantages = draw(60, 1)
    leaf = log_probs.clone().requires_grad_()
    total = torch.zeros(())
    for part in parts:
        chosen = reference[part] if with_kl else None
        loss = objective(leaf[part], old[part], chosen, advantages[part], 60, ranks) / ranks
        loss.backward()
        total += loss.detach()
    assert leaf.grad is not None
    return total, leaf.grad


ONE = [slice(0, 60)]
MANY = [slice(0, 7), slice(7, 41), slice(41, 42), slice(42, 60)]


@pytest.mark.parametrize("with_kl", [False, True])
def test_however_tokens_are_split_the_loss_is_the_mean_over_all(with_kl: bool) -> None:
    objective = partial(grpo_loss, GrpoConfig(kl=0.1))
    for ranks in (1, 3):
        for left, right in zip(
            loss_and_gradient(objective, ONE, 1, with_kl),
            loss_and_gradient(objective, MANY, ranks, with_kl),
            strict=True,
        ):
            torch.testing.assert_close(left, right)


# verl's own functions ------------------------------------------------------------------------------------------------


def of_verl(config: GrpoConfig) -> Loss:
    from omegaconf import OmegaConf
    from verl.trainer.ppo import core_algos

    clips = {"clip_ratio_low": config.clip_low, "clip_ratio_high": config.clip_high, "clip_ratio_c": config.clip_dual}
    clips["clip_ratio"] = config.clip_low

    def loss(
        log_probs: torch.Tensor,
        old: torch.Tensor,
        reference: torch.Tensor | None,
        advantages: torch.Tensor,
        tokens: int,
        ranks: int,
    ) -> torch.Tensor:
        batch: dict[str, Any] = {"dp_size": ranks, "batch_num_tokens": tokens}
        chosen = OmegaConf.create(clips | {"global_batch_info": batch})
        mask = torch.ones_like(log_probs, dtype=torch.bool)[None]
        given = (old[None], log_probs[None], advantages[None], mask, "token-mean", chosen)
        found, _ = core_algos.compute_policy_loss_vanilla(*given)
        if reference is not None:
            apart = core_algos.kl_penalty(log_probs[None], reference[None], "low_var_kl")
            found = found + config.kl * core_algos.agg_loss(apart, mask, "token-mean", **batch)
        return torch.as_tensor(found)

    return loss


@pytest.mark.skipif(find_spec("verl") is None, reason="needs verl: make test-integrations")
@pytest.mark.filterwarnings("ignore")
def test_as_verl_has_it() -> None:
    from verl.trainer.ppo import core_algos

    config = GrpoConfig(clip_low=0.2, clip_high=0.28, clip_dual=2.0, kl=0.1)
    rewards, groups = torch.rand(13), [0] * 5 + [1] * 4 + [2] * 3 + [3]
    mask = torch.ones(len(rewards), 1)
    found, _ = core_algos.compute_grpo_outcome_advantage(rewards.clone()[:, None], mask, np.asarray(groups), 1e-6)
    torch.testing.assert_close(grpo_advantages(rewards, groups), torch.as_tensor(found)[:, 0], rtol=1e-6, atol=1e-6)
    for with_kl in (False, True):
        for parts, ranks in ((ONE, 1), (MANY, 3)):
            both = (partial(grpo_loss, config), of_verl(config))
            left, right = (loss_and_gradient(one, parts, ranks, with_kl) for one in both)
            torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-7)
