"""Planners: pure functions that spread samples over ranks and microbatches. No torch, no process group."""

from odc.balance.bound import lower_bound
from odc.balance.cost import (
    Cost,
    QuadraticCost,
    WindowedCost,
    cost_from_config,
    cost_of,
    linear_cost,
    quadratic,
    transformer_cost,
)
from odc.balance.lb_split import floor_of, lb_split
from odc.balance.partition import partition
from odc.balance.plan import Plan
from odc.balance.planners import lb_dynamic, lb_micro, lb_mini, local_sort, queue_of
from odc.balance.policies import POLICIES, policy_named
from odc.balance.slices import SplitSample, longest_in_pieces, longest_piece, most_pieces

__all__ = [
    "POLICIES",
    "Cost",
    "Plan",
    "QuadraticCost",
    "SplitSample",
    "WindowedCost",
    "cost_from_config",
    "cost_of",
    "floor_of",
    "lb_dynamic",
    "lb_micro",
    "lb_mini",
    "lb_split",
    "linear_cost",
    "local_sort",
    "longest_in_pieces",
    "longest_piece",
    "lower_bound",
    "most_pieces",
    "partition",
    "policy_named",
    "quadratic",
    "queue_of",
    "transformer_cost",
]
