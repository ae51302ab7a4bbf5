"""Planners: pure functions that spread samples over ranks and microbatches. No torch, no process group."""

from collections.abc import Callable

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
from odc.balance.policies import lb_dynamic, lb_micro, lb_mini, local_sort, queue_of
from odc.errors import PlanError

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

#: The policies by name, as the command line and saved runs spell them.
POLICIES: dict[str, Callable[..., Plan]] = {"local_sort": local_sort, "lb_micro": lb_micro, "lb_mini": lb_mini}


def policy_named(name: str) -> Callable[..., Plan]:
    """The policy called `name`; PlanError listing the known names otherwise."""
    try:
        return POLICIES[name]
    except KeyError:
        raise PlanError(f"there is no policy {name!r}; known: {', '.join(POLICIES)}") from None
