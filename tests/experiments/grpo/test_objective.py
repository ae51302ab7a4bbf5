from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from odc.errors import ConfigError
from odc.experiments.grpo.config import GrpoConfig
from odc.experiments.grpo.objective import Objective, grpo_advantages, kl_estimate, objective_named, policy_losses

needs_verl = pytest.mark.skipif(find_spec("verl") is None, reason="needs verl: make test-integrations")


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


def loss_and_gradient(
    objective: Objective, parts: list[slice], ranks: int, with_kl: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of 60 tokens in `parts`, one microbatch each, averaged over ranks as FSDP does."""
    log_probs, old, reference, advantages = draw(60, 1)
    leaf = log_probs.clone().requires_grad_()
    total = torch.zeros(())
    for part in parts:
        chosen = reference[part] if with_kl else None
        loss = objective.loss(leaf[part], old[part], chosen, advantages[part], 60, ranks) / ranks
        loss.backward()
        total += loss.detach()
    assert leaf.grad is not None
    return total, leaf.grad


ONE = [slice(0, 60)]
MANY = [slice(0, 7), slice(7, 41), slice(41, 42), slice(42, 60)]


@pytest.mark.parametrize("with_kl", [False, True])
def test_however_tokens_are_split_the_loss_is_the_mean_over_all(with_kl: bool) -> None:
    objective = objective_named(GrpoConfig(objective="odc", kl=0.1))
    for ranks in (1, 3):
        for left, right in zip(
            loss_and_gradient(objective, ONE, 1, with_kl),
            loss_and_gradient(objective, MANY, ranks, with_kl),
            strict=True,
        ):
            torch.testing.assert_close(left, right)


# verl's own functions ------------------------------------------------------------------------------------------------


@needs_verl
@pytest.mark.filterwarnings("ignore")
def test_as_verl_has_it() -> None:
    config = GrpoConfig(clip_low=0.2, clip_high=0.28, clip_dual=2.0, kl=0.1)
    own, verl = (objective_named(config.with_(objective=name)) for name in ("odc", "auto"))
    assert (own.name, verl.name) == ("odc", "verl")
    rewards, groups = torch.rand(13), [0] * 5 + [1] * 4 + [2] * 3 + [3]
    torch.testing.assert_close(own.advantages(rewards, groups), verl.advantages(rewards, groups), rtol=1e-6, atol=1e-6)
    for with_kl in (False, True):
        for parts, ranks in ((ONE, 1), (MANY, 3)):
            left, right = (loss_and_gradient(one, parts, ranks, with_kl) for one in (own, verl))
            torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-7)


@pytest.mark.skipif(find_spec("verl") is not None, reason="verl is installed")
def test_without_verl() -> None:
    assert objective_named(GrpoConfig(objective="auto")).name == "odc"
    with pytest.raises(ConfigError, match="pip install verl"):
        objective_named(GrpoConfig(objective="verl"))
