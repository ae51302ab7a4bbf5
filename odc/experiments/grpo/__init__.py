"""Reinforcement learning: GRPO on a causal language model, rollouts in a process of their own."""

from odc.experiments.config import GrpoConfig
from odc.experiments.grpo.objective import grpo_advantages, grpo_loss, kl_estimate, policy_losses
from odc.experiments.grpo.samples import Sample, Task, UpperHalf
from odc.experiments.grpo.step import GrpoResult, GrpoStep, GrpoWorkload, run, run_rank

__all__ = [
    "GrpoConfig",
    "GrpoResult",
    "GrpoStep",
    "GrpoWorkload",
    "Sample",
    "Task",
    "UpperHalf",
    "grpo_advantages",
    "grpo_loss",
    "kl_estimate",
    "policy_losses",
    "run",
    "run_rank",
]
