"""Reinforcement learning: GRPO on a causal language model, rollouts in a process of their own."""

from odc.experiments.grpo.config import GrpoConfig
from odc.experiments.grpo.job import run, run_rank
from odc.experiments.grpo.objective import Objective, grpo_advantages, kl_estimate, objective_named, policy_losses
from odc.experiments.grpo.results import GrpoResult, GrpoStep
from odc.experiments.grpo.samples import Sample
from odc.experiments.grpo.tasks import Task, UpperHalf

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
