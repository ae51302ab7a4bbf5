"""What each arm's step would take on a machine that is not there. Everything it says is simulated."""

from odc.arms import ARMS, Arm, arm_named
from odc.simulate.cluster import Cluster
from odc.simulate.events import simulate_events
from odc.simulate.result import StepResult
from odc.simulate.run import simulate, simulate_plan
from odc.simulate.step import Step
from odc.simulate.vectorised import simulate_vectorised
from odc.simulate.workload import Model, Unit, even_model

__all__ = [
    "ARMS",
    "Arm",
    "Cluster",
    "Model",
    "Step",
    "StepResult",
    "Unit",
    "arm_named",
    "even_model",
    "simulate",
    "simulate_events",
    "simulate_plan",
    "simulate_vectorised",
]
