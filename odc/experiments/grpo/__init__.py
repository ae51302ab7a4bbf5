"""Reinforcement learning: GRPO on a causal language model, rollouts in a process of their own."""

from odc.experiments.grpo.config import GrpoConfig
from odc.experiments.grpo.objective import Objective, grpo_advantages, kl_estimate, objective_named, policy_losses
from odc.experiments.grpo.samples import Sample, Task, UpperHalf
from odc.experiments.grpo.step import GrpoResult, GrpoStep
from odc.experiments.grpo.workload import GrpoWorkload, run, run_rank

__all__ = [
    "GrpoConfig",
    "GrpoResult",
    "GrpoStep",
    "GrpoWorkload",
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
