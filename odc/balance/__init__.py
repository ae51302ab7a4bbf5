"""Planners: pure functions that spread samples over ranks and microbatches. No torch, no process group."""

from odc.balance.bound import lower_bound
from odc.balance.cost import (
    Cost,
    QuadraticCost,
    WindowedCost,
    cost_from_config,
    linear_cost,
    quadratic,
    transformer_cost,
)
from odc.balance.fit import Fit, fit, fit_scale
from odc.balance.partition import partition
from odc.balance.plan import Plan
from odc.balance.planners import POLICIES, lb_dynamic, lb_micro, lb_mini, local_sort, policy_named, queue_of

__all__ = [
    "POLICIES",
    "Cost",
    "Fit",
    "Plan",
    "QuadraticCost",
    "WindowedCost",
    "cost_from_config",
    "fit",
    "fit_scale",
    "lb_dynamic",
    "lb_micro",
    "lb_mini",
    "linear_cost",
    "local_sort",
    "lower_bound",
    "partition",
    "policy_named",
    "quadratic",
    "queue_of",
    "transformer_cost",
]
