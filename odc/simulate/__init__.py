"""Simulated steps of every arm on machines that are not there."""

from odc.simulate.cluster import Cluster
from odc.simulate.events import simulate
from odc.simulate.step import Step, StepResult
from odc.simulate.study import simulate_plan
from odc.simulate.workload import Model, Unit, even_model

__all__ = [
    "Cluster",
    "Model",
    "Step",
    "StepResult",
    "Unit",
    "even_model",
    "simulate",
    "simulate_plan",
]
