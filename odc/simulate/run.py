"""Simulate a step, or a plan under an arm."""

from __future__ import annotations

from odc.arms import Arm
from odc.balance import Plan
from odc.simulate.cluster import Cluster
from odc.simulate.events import simulate_events
from odc.simulate.result import StepResult
from odc.simulate.step import Step
from odc.simulate.vectorised import simulate_vectorised
from odc.simulate.workload import Model


def simulate(step: Step) -> StepResult:
    """One step, by the fast simulator wherever it knows how."""
    queues = step.cluster.owner_skew > 1 and step.shards > 1 and step.transport in ("on demand", "dynamic")
    return simulate_events(step) if queues else simulate_vectorised(step)


def simulate_plan(
    plan: Plan,
    arm: Arm,
    cluster: Cluster,
    model: Model,
    *,
    seconds_per_cost: float = 1.0,
    prefetch: int = 1,
    seed: int = 0,
) -> StepResult:
    """One step of a plan under an arm's transport; `seconds_per_cost` turns the plan's costs into seconds.

    Empty microbatches of a plan are place-holders: left out on demand, dummies under collectives.
    """
    seconds = [
        [cost * seconds_per_cost for cost, samples in zip(costs, own, strict=True) if samples]
        for costs, own in zip(plan.costs, plan.ranks, strict=True)
    ]
    return simulate(Step(cluster, model, seconds, arm.transport, arm.within_node, prefetch, seed))
