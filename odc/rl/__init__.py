"""Reinforcement learning: GRPO on a causal language model, rollouts in a process of their own."""

from odc.rl.config import GrpoConfig
from odc.rl.job import run, run_rank
from odc.rl.objective import Objective, grpo_advantages, kl_estimate, objective_named, policy_losses
from odc.rl.results import GrpoResult, GrpoStep
from odc.rl.samples import Sample
from odc.rl.tasks import Task, UpperHalf

__all__ = [
    "GrpoConfig",
    "GrpoResult",
    "GrpoStep",
    "Objective",
    "Sample",
    "Task",
    "UpperHalf",
    "grpo_advantages",
    "kl_estimate",
    "objective_named",
    "policy_losses",
    "run",
    "run_rank",
]
